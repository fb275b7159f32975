"""What the suite stands on, and under which licenses: `python tests/supply/licenses.py` prints
docs/licenses.md from the metadata of the installed packages that constraints.txt pins."""

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)
HEAD = """\
# Licenses of what is used

Every package that `constraints.txt` pins, with the license that its own metadata states. Written
by `python tests/supply/licenses.py > docs/licenses.md`, which reads the installed packages. The
texts and vocabularies that are downloaded are in [data.md](data.md).

| package | version | license |
|---|---|---|
"""


def pins() -> dict[str, str]:
    """Package -> pinned version."""
    return dict(PIN.findall((ROOT / "constraints.txt").read_text("utf-8")))


def license_of(package: Distribution) -> str:
    """The SPDX expression where there is one, else classifiers, else the first line of the free
    field; "not stated" where the metadata say nothing."""
    meta = package.metadata
    if expression := meta.get("License-Expression"):
        return expression
    prefix = "License :: "
    named = [c.split(" :: ")[-1] for c in meta.get_all("Classifier", []) if c.startswith(prefix)]
    if named := [name for name in named if name != "OSI Approved"]:
        return ", ".join(named)
    lines = (meta.get("License") or "").strip().splitlines()
    return lines[0].strip().replace("|", "\\|") if lines else "not stated"


def page() -> str:
    rows = []
    for name, version in sorted(pins().items(), key=lambda pin: pin[0].lower()):
        try:
            stated = license_of(distribution(name))
        except PackageNotFoundError:
            stated = "not installed here"
        rows.append(f"| {name} | {version} | {stated} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
