"""Databases and pages that several modules read; building one takes seconds."""

import math

import duckdb
import pytest
from made_up_paper import write_paper
from pages import make, page_of, setting
from synthetic import H200, bench_metrics, record_of, write_library, write_run, write_train

from mol.plan.build import plan
from mol.plan.experiments import PAPER
from mol.report.page import Extras
from mol.store.ingest import build


@pytest.fixture(scope="session")
def two_scales(tmp_path_factory):
    """A folder with `runs` and `mol.duckdb`: every planned run, at smoke and at paper scale."""
    folder = tmp_path_factory.mktemp("two-scales")
    write_library(folder / "runs", "smoke")
    write_library(folder / "runs", "paper", H200)
    build(folder / "mol.duckdb", folder / "runs", folder / "no-records", PAPER)
    return folder


@pytest.fixture(scope="session")
def both_page(two_scales):
    """The page of every planned run at smoke and at paper scale."""
    counts = [{"place": "Table 2", "computed": 84722688, "printed": "84.7M", "match": True}]
    settings = [setting("3e-4")]
    extras = Extras(counts=counts, settings=settings)
    return page_of(two_scales / "mol.duckdb", two_scales, PAPER, extras)


@pytest.fixture(scope="session")
def empty_page(tmp_path_factory):
    return make(tmp_path_factory.mktemp("empty"))


@pytest.fixture
def suite(tmp_path):
    """Folders of a made-up paper: write runs, then ask for a cell's verdict."""

    class Suite:
        paper = write_paper(tmp_path / "paper")
        runs = tmp_path / "runs"

        def spec(self, condition, seed=1, scale="paper"):
            for planned in plan(scale, folder=self.paper):
                if (planned.spec.condition, planned.spec.seed) == (condition, seed):
                    return planned.spec
            raise KeyError(condition)

        def train(self, condition, ppls, scale="paper", **changes):
            for seed, ppl in enumerate(ppls, start=1):
                spec = self.spec(condition, seed, scale)
                write_train(self.runs, spec, math.log(ppl), **changes)

        def bench(self, condition, scale="paper", hardware=H200, **labels):
            spec = self.spec(condition, seed=0, scale=scale)
            metrics = [
                metric.model_copy(update={"labels": metric.labels | labels})
                for metric in bench_metrics(spec)
            ]
            write_run(self.runs, record_of(spec, metrics, hardware=hardware))

        def verdict(self, cell_id, scale="paper"):
            database = tmp_path / "mol.duckdb"
            build(database, self.runs, tmp_path / "records", self.paper)
            with duckdb.connect(database, read_only=True) as connection:
                cursor = connection.execute(
                    "SELECT * FROM verdicts WHERE cell_id = ? AND scale = ?", [cell_id, scale]
                )
                names = [column[0] for column in cursor.description]
                rows = cursor.fetchall()
            return dict(zip(names, rows[0], strict=True)) if rows else None

    return Suite()
