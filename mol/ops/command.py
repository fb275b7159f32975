"""`mol selfcheck`: every fast path against its plain reference, on this machine."""

import argparse
import dataclasses
import json
import math

from mol.base import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", action="store_true", help="print a list of rows")


def run(args: argparse.Namespace) -> int:
    """Print one line a check; returns 1 if any failed."""
    import torch

    from mol.ops.selfcheck import run_checks

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: no CUDA device is visible to torch; use --device cpu")
    checks = run_checks(args.device)
    if args.json:
        rows = [dataclasses.asdict(check) | {"passed": check.passed} for check in checks]
        for row in rows:  # JSON has neither NaN nor infinity
            if row["error"] is not None and not math.isfinite(row["error"]):
                row["error"], row["detail"] = None, "NaN or infinity in the result"
        print(json.dumps(rows, indent=2, allow_nan=False))
    else:
        for check in checks:
            error = check.detail if check.error is None else f"{check.error:.1e} in {check.worst}"
            print(
                f"{'pass' if check.passed else 'FAIL'}  {check.name:36} {check.dtype:9}"
                f"tolerance {check.tolerance:.0e}  relative error {error}"
            )
        failed = sum(not check.passed for check in checks)
        print(f"{len(checks) - failed} of {len(checks)} passed on {args.device}")
    return 0 if all(check.passed for check in checks) else 1
