"""Run by test_no_network.py in a process without a network: text to page, and what needs one."""

import json
import os
import random
import socket
import sys
from pathlib import Path

from written_items import WRITTEN, write_items, written_tables

from mol.cli import main
from mol.evaluate import items
from mol.plan.build import Config, plan
from mol.plan.spec import ZeroShotSpec

WORDS = "amber brook cedar delta ember fjord grove harbor inlet juniper kelp lagoon marsh".split()


def reachable() -> bool:
    try:
        socket.create_connection(("1.1.1.1", 443), timeout=5).close()
    except OSError:
        return False
    return True


def write(name: str, spec) -> str:
    Path(name).write_text(spec.model_dump_json())
    return name


def everything() -> list[tuple[str, int]]:
    """(command, exit code) of a run from local text to the page, then of data from the index."""
    pick = random.Random(0)
    text = [" ".join(pick.choices(WORDS, k=80)) for _ in range(1000)]
    Path("text.txt").write_text("\n\n".join(text))
    source = {"kind": "file", "train": "text.txt"}
    config = Config(sources={"wikitext103": source})
    (run,) = [r.spec for r in plan("smoke", config) if r.spec.condition == "ct-moe"]
    score = ZeroShotSpec(
        scale="smoke", condition="ct-moe", train_run=run.run_id, tasks=("piqa", "arc_easy"),
        limit=2, max_length=512, seed=run.seed,
    )  # fmt: skip
    # Written items stand in for the pinned ones, which come with `mol zeroshot prepare`.
    real = items.wrong_set
    items.wrong_set = lambda key, rows, sha: "" if sha in WRITTEN else real(key, rows, sha)
    write_items(Path("items"), written_tables())
    (from_index,) = [r.spec for r in plan("smoke") if r.spec.condition == "ct-moe"]
    folder = f"results/data/smoke/{run.data.folder}"
    commands = [
        ["data", "--spec", write("data.json", run.data), "--out", folder],
        ["train", "--spec", write("train.json", run), "--threads", "1", "--quiet"],
        ["zeroshot", "run", "--spec", write("score.json", score), "--items", "items"],
        ["store", "build"],
        ["report"],
        ["track"],
        ["data", "--spec", write("index.json", from_index.data), "--out", "elsewhere"],
    ]
    return [(" ".join(command[:2]), main(command)) for command in commands]


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    found = {"reachable": reachable()} | {"codes": [] if reachable() else everything()}
    Path("found.json").write_text(json.dumps(found))
