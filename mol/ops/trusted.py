"""May this GPU's kernels be relied on? The self-check, run once for each code and machine."""

import functools
import hashlib
import importlib.metadata
import json
import os
from pathlib import Path

import torch

from mol.base import UserError, write_atomic
from mol.ops.selfcheck import run_checks

KERNEL_PACKAGES = ("triton", "flash-linear-attention", "tilelang")
OPS = Path(__file__).parent


def check_kernels(device: torch.device) -> list[str]:
    """On a GPU, compare every fast path and gradient with its reference before relying on them:
    some compiler versions compute wrong gradients from right outputs. Returns a note for the
    record. Raises UserError naming the paths that fail.

    A pass is remembered for this code, these versions and this kind of GPU, in the user's cache
    folder; a failure never is.
    """
    if device.type != "cuda":
        return []
    passed = _cache_folder() / f"{_key(device)}.json"
    try:
        return [json.loads(passed.read_text("utf-8"))["note"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not checked yet, or a damaged memory: check
    checks = run_checks("cuda")
    failed = [check.name for check in checks if not check.passed]
    if failed:
        raise UserError(
            f"self-check failed on this GPU: {', '.join(failed)}; refused to run. "
            "`mol selfcheck --device cuda` shows the errors and versions"
        )
    worst = max(checks, key=lambda check: check.error / check.tolerance)
    note = (
        f"self-check: {len(checks)} of {len(checks)} passed; nearest to its tolerance of "
        f"{worst.tolerance:.0e}: {worst.name}, {worst.error:.1e} in {worst.worst}"
    )
    passed.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(passed, json.dumps({"note": note}) + "\n")
    return [note]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mol" / "selfcheck"


@functools.cache
def _key(device: torch.device) -> str:
    state = hashlib.sha256(torch.cuda.get_device_name(device).encode())
    state.update(f"{torch.__version__} {torch.version.cuda}".encode())
    for name in KERNEL_PACKAGES:
        try:
            state.update(f"{name} {importlib.metadata.version(name)}".encode())
        except importlib.metadata.PackageNotFoundError:
            continue
    for path in sorted([*OPS.rglob("*.py"), *(OPS.parent / "model").glob("*.py")]):
        state.update(path.read_bytes())
    return state.hexdigest()[:16]
