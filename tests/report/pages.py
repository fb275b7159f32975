"""Pages for tests: of a folder's runs, and of a record that wants to be more than text."""

from pathlib import Path

from synthetic import CPU, record_of, train_metrics, write_run

from mol.plan.build import plan
from mol.plan.experiments import PAPER
from mol.report.figures import write_figures
from mol.report.page import Extras, render
from mol.report.source import Source
from mol.store.ingest import build

HOSTILE = (
    "</pre></details><script>document.title='taken'</script><img src=x onerror=alert(1)> \" ' &"
)


def setting(value: str) -> dict:
    return {
        "experiments": ("E01", "E05"), "conditions": (), "setting": "lr", "value": value,
        "status": "stated", "source": "4.2", "effect": "", "effects": [],
    }  # fmt: skip


def make(folder: Path, paper: Path = PAPER, extras: Extras | None = None) -> Path:
    """Database, figures and page from the runs below `folder`."""
    build(folder / "mol.duckdb", folder / "runs", folder / "no-records", paper)
    return page_of(folder / "mol.duckdb", folder, paper, extras or Extras())


def page_of(database: Path, folder: Path, paper: Path, extras: Extras) -> Path:
    source = Source(database)
    figures = write_figures(source, folder / "figures", paper)
    page = folder / "index.html"
    page.write_text(render(source, figures, extras), "utf-8")
    return page


def hostile_runs(folder: Path) -> None:
    for planned in plan("smoke"):
        spec = planned.spec
        if spec.kind == "train" and spec.condition == "mol-top3":
            record = record_of(
                spec,
                train_metrics(spec, 3.0),
                hardware=CPU.model_copy(update={"name": HOSTILE}),
                data={"source": HOSTILE, HOSTILE: HOSTILE},
                notes=(HOSTILE,),
            )
            write_run(folder / "runs", record)
