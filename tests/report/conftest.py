"""Databases and pages that several modules read; building one takes seconds."""

import pytest
from pages import make, page_of, setting
from synthetic import H200, write_library

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
