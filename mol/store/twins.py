"""Runs of one's own and records that ship with the repository, each under a name of its own.

The same specification gives the same run_id on every machine, so both places may hold it.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mol.store.read import Found, Refusal, read_folders


def read_runs(runs_root: Path, records_root: Path) -> Iterator[Found | Refusal]:
    """Own runs, then shipped records, each by path.

    An own run takes the place of the shipped record of the same run on the same machine, and its
    notes say so. A record of another machine is kept beside it as <run_id>@<folder>, after the
    folder below `records_root` that names the machine. A second copy is refused.
    """
    shipped = list(read_folders(Path(records_root), placed=False))
    places: dict[tuple, str] = {}
    for found in shipped:
        if isinstance(found, Found):
            places.setdefault(_key(found), _folder(found))
    names: dict[str, str] = {}  # name -> place
    own: set[tuple] = set()
    for found in read_folders(Path(runs_root), placed=True):
        if isinstance(found, Found):
            names[found.run_id] = found.source
            own.add(_key(found))
            if place := places.get(_key(found)):
                note = f"takes the place of a shipped record (records/{place})"
                found = replace(found, notes=(*found.notes, note))
        yield found
    kept: dict[tuple, str] = {}
    for found in shipped:
        if isinstance(found, Refusal):
            yield found
            continue
        if _key(found) in own:
            continue
        if found.run_id in names and _key(found) not in kept:
            found = replace(found, run_id=f"{found.run_id}@{_folder(found)}")
        first = kept.get(_key(found)) or names.get(found.run_id)
        if first:
            reason = f"is run {found.record.run_id} again; it was read from {first}: delete one"
            yield Refusal(file=f"{found.source}/record.json", reason=reason)
            continue
        names[found.run_id] = kept[_key(found)] = found.source
        yield found


def _key(found: Found) -> tuple[str, str, int]:
    hardware = found.record.hardware
    return found.record.run_id, hardware.name, hardware.count


def _folder(found: Found) -> str:
    """The folder below the records' root, as a part of a name."""
    return re.sub(r"[^\w.-]+", "-", found.source.split("/")[1])
