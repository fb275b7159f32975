"""Which source files decide which results, as one hash a group.

The workflow takes these hashes as inputs, so an edit reruns the stages it can change and no
other: snakemake's own code trigger sees a rule's command line only, not the modules behind it.
"""

import hashlib
import os
from pathlib import Path
from typing import Literal

from mol.base import scratch

ROOT = Path(__file__).parents[2]
Group = Literal["data", "train", "zeroshot", "bench", "protocols", "store", "report"]

# Command lines and listings read results or parse arguments; they do not decide numbers.
_SKIP = ("command.py", "counts.py", "selfcheck.py", "trusted.py", "reference.py", "naive.py")
_MODEL = ("mol/base.py", "mol/model/**/*.py", "mol/ops/**/*.py")
_SCORING = ("mol/evaluate/perplexity.py", "mol/evaluate/dispatch_paths.py")
GROUPS: dict[Group, tuple[str, ...]] = {  # "!" takes files out again
    "data": ("mol/base.py", "mol/data/*.py", "!mol/data/loader.py", "!mol/data/overlap.py"),
    "train": (*_MODEL, "mol/data/loader.py", "mol/train/*.py", *_SCORING),
    "zeroshot": (
        *_MODEL,
        "mol/evaluate/**/*",
        *(f"!{path}" for path in _SCORING),
        "!mol/evaluate/windows.py",
        "!mol/evaluate/protocols.py",
        "!mol/evaluate/calibrate.py",
        "!mol/evaluate/sanity.py",
        "!mol/evaluate/versions.py",
        "!mol/evaluate/old_harness.py",
    ),
    # What a model decides is in its training run, on which a matrix of protocols depends.
    "protocols": ("mol/evaluate/protocols.py", "mol/evaluate/windows.py", "mol/store/matrix.py"),
    "bench": (*_MODEL, "mol/bench/*.py"),
    # The database holds the verdicts, so what judges belongs to it, and what knows the plan.
    "store": (
        "mol/base.py",
        "mol/known.py",
        *(f"mol/{name}/config.py" for name in ("bench", "data", "model")),
        *(
            f"mol/plan/{name}.py"
            for name in ("build", "cost", "experiments", "scale", "select", "spec", "variant")
        ),
        "mol/store/**/*",
        "mol/paper/**/*",
        *(
            f"mol/report/{name}.py"
            for name in (
                "alike",
                "claims",
                "compare",
                "comparisons",
                "cost",
                "counted",
                "crossover",
                "effects",
                "judge",
                "limit",
                "margins",
                "number",
                "paired",
                "query",
                "readings",
                "rows",
                "verdicts",
            )
        ),
    ),
    "report": ("mol/report/**/*", "mol/paper/**/*"),
}


def files_of(group: Group, root: Path = ROOT) -> list[Path]:
    """The group's source files in a stable order."""
    found: set[Path] = set()
    for pattern in GROUPS[group]:
        if pattern.startswith("!"):
            found -= set(root.glob(pattern[1:]))
        else:
            found |= {path for path in root.glob(pattern) if path.is_file()}
    keep = (p for p in found if not p.name.endswith(_SKIP) and "__pycache__" not in p.parts)
    return sorted(keep)


def source_hash(group: Group, root: Path = ROOT) -> str:
    """SHA-256 over the names and contents of the group's files."""
    state = hashlib.sha256()
    for path in files_of(group, root):
        state.update(f"{path.relative_to(root)}\0".encode())
        state.update(path.read_bytes() + b"\0")
    return state.hexdigest()


def write_changed(folder: Path, contents: dict[str, str], after: float = 0.0) -> None:
    """Write files of these names and contents to `folder`, each whole or not at all.

    An unchanged file keeps its modification time, which is what triggers a rerun. One that changes
    is dated after `after` (seconds since 1970), the latest of what depends on it: a clock that went
    back would otherwise hide the change. Nothing is synced: the next plan compares again. Raises
    UserError where the disk refuses.
    """
    changed = [
        (folder / name, content.encode())
        for name, content in contents.items()
        if not (folder / name).is_file() or (folder / name).read_bytes() != content.encode()
    ]
    if not changed:
        return
    with scratch(folder) as fresh:
        folder.mkdir(exist_ok=True)
        for path, content in changed:
            part = fresh / path.name
            part.write_bytes(content)
            if part.stat().st_mtime <= after:
                os.utime(part, (after + 1, after + 1))
            part.replace(path)
