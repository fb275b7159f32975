"""docs/audit.md: up to date, complete, and readable on a repository host."""

import math
import re
from pathlib import Path

import pytest
from synthetic import H200, write_library, write_train

from mol.cli import main
from mol.paper.claims import load_claims
from mol.paper.derivations import check_paper
from mol.paper.reported import load_paper
from mol.plan.build import plan
from mol.plan.hashes import ROOT
from mol.report.audit_page import write_audit_page
from mol.report.markup import markdown


@pytest.fixture(scope="module")
def shipped():
    """What the shipped records give now."""
    return ROOT / "docs" / "audit.md", ROOT / "results" / "records"


def test_the_committed_page_is_up_to_date(shipped, tmp_path):
    page, records = shipped
    fresh = write_audit_page(tmp_path / "audit.md", records).read_text("utf-8")
    assert page.read_text("utf-8") == fresh, "run `mol report --audit-page docs/audit.md`"


def test_every_contradiction_flag_and_claim_stands_in_it(shipped):
    text = shipped[0].read_text("utf-8")
    rows = check_paper(load_paper())
    wrong = [row for row in rows if row.verdict == "contradicted"]
    assert f"{len(wrong)} checks in which" in text
    for row in wrong:
        assert markdown(row.place) in text and markdown(row.reading) in text
        assert all(markdown(source.printed) in text for source in row.inputs), row.id
    flags = [row for row in rows if row.verdict == "flag"]
    assert f"{len(flags)} statements" in text
    assert all(markdown(row.reading) in text for row in flags)
    assert all(markdown(claim.text) in text for claim in load_claims(load_paper()))


def test_no_table_is_wider_than_six_columns_and_links_lead_somewhere(shipped):
    page = shipped[0]
    text = page.read_text("utf-8")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert tables and max(len(re.findall(r"(?<!\\)\|", line)) - 1 for line in tables) <= 6
    headings = [line.lstrip("# ").lower() for line in text.splitlines() if line[:1] == "#"]
    anchors = {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert target[1:] in anchors if target[0] == "#" else (page.parent / target).is_file()


def test_shipped_records_are_judged_and_named(tmp_path):
    for planned in plan("paper"):
        if planned.spec.condition == "mol-top3":
            folder = tmp_path / "records" / "nvidia-h200"
            write_train(folder, planned.spec, math.log(30.95), hardware=H200)
    path = tmp_path / "audit.md"
    options = ["--audit-page", str(path), "--records", str(tmp_path / "records")]
    assert main(["report", *options]) == 0
    text = path.read_text("utf-8")
    assert "| 1 x NVIDIA H200 | paper | train | 3 |" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| Table 1: MoL K=5 top-3")]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == [
        "30.95 ± 0.11", "30.95 (paper)", "+0.00 (+0.000 nat)", "reproduced", "NVIDIA H200",
    ]  # fmt: skip
    assert re.search(r"6 training runs, 4.9B tokens \|", text), "one rate of two costs nothing"


def test_it_is_written_from_the_shipped_records_alone(tmp_path, monkeypatch):
    """Runs of one's own, wherever they lie, change nothing."""
    monkeypatch.chdir(tmp_path)
    write_library(Path("results/runs"), "smoke")
    page = write_audit_page(tmp_path / "audit.md", Path("results/records")).read_text("utf-8")
    assert "None yet, so no number is judged by a run." in page and "smoke" not in page
