"""`mol export`: a trained run as a folder that transformers and lm-eval load."""

import argparse
import json
from pathlib import Path

from mol.plan.select import RESULTS, add_scale_arguments, chosen_config


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run_id, condition, or a folder with weights")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where to write")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="its prepared corpus")
    add_scale_arguments(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: results")
    parser.add_argument("--json", action="store_true", help="print the index of the export")


def run(args: argparse.Namespace) -> int:
    from transformers.utils import logging

    from mol.export.checkpoint import find_checkpoint
    from mol.export.write import check_target, write_export

    logging.disable_progress_bar()
    check_target(args.to)
    checkpoint = find_checkpoint(args.run, args.results, chosen_config(args), args.data)
    index = write_export(checkpoint, args.to)
    if args.json:
        print(json.dumps({"folder": str(args.to), **index}, indent=1))
    else:
        print(f"{index['run_id']}: {index['parameters']:,} parameters, {len(index['files'])} files")
        print(f'AutoModelForCausalLM.from_pretrained("{args.to}", trust_remote_code=True)')
    return 0
