"""Databases that several modules read; building one takes seconds."""

import pytest
from synthetic import H200, write_library

from mol.plan.experiments import PAPER
from mol.store.ingest import build


@pytest.fixture(scope="session")
def two_scales(tmp_path_factory):
    """A folder with `runs` and `mol.duckdb`: every planned run, at smoke and at paper scale."""
    folder = tmp_path_factory.mktemp("two-scales")
    write_library(folder / "runs", "smoke")
    write_library(folder / "runs", "paper", H200)
    build(folder / "mol.duckdb", folder / "runs", folder / "no-records", PAPER)
    return folder
