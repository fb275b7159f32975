import json
import math
import re
import subprocess
import sys
import time

import pytest
from made_up_paper import write_paper
from synthetic import write_train

from mol.cli import main
from mol.paper.claims import load_claims
from mol.paper.reported import load_paper
from mol.plan.build import plan
from mol.plan.experiments import PAPER
from mol.store.ingest import build


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """Three seeds of one row at paper scale, all rows at smoke scale."""
    folder = tmp_path_factory.mktemp("audit")
    paper = write_paper(folder / "paper")
    for scale, ppl in (("smoke", 40.0), ("paper", 30.01)):
        for planned in plan(scale, folder=paper):
            spec = planned.spec
            if spec.kind == "train" and (scale == "smoke" or spec.condition == "plain"):
                write_train(folder / "runs", spec, math.log(ppl) + spec.seed * 1e-4)
    build(folder / "mol.duckdb", folder / "runs", folder / "records", paper)
    return str(folder / "mol.duckdb")


@pytest.fixture(scope="module")
def paper_database(tmp_path_factory):
    """The paper without any run."""
    folder = tmp_path_factory.mktemp("paper-audit")
    build(folder / "mol.duckdb", folder / "runs", folder / "records", PAPER)
    return str(folder / "mol.duckdb")


def audit(capsys, database, *options):
    assert main(["audit", "--db", database, *options]) == 0
    return capsys.readouterr().out


def test_json_lists_every_number_but_settings(database, capsys):
    rows = {row["cell_id"]: row for row in json.loads(audit(capsys, database, "--json"))}
    assert rows.keys() == {
        "t1-plain", "t1-fancy", "t1-web", "t1-plain-web", "t2-128", "t2-256", "t2-unnamed",
        "text-gap", "text-cross",
    }  # fmt: skip
    plain = rows["t1-plain"]
    assert (plain["verdict"], plain["scale"], plain["n_runs"]) == ("reproduced", "paper", 3)
    assert plain["reported"] == "30.00 ± 0.05"
    assert plain["reproduced"] == pytest.approx(30.016, abs=1e-3)
    assert plain["parts"].keys() == {"rounding", "seeds", "evaluation"}
    fancy = rows["t1-fancy"]
    assert (fancy["verdict"], fancy["scale"]) == ("not run at paper scale", "smoke")
    assert rows["t2-unnamed"]["verdict"] == "not judgeable here"
    assert "does not name the hardware" in rows["t2-unnamed"]["judgement"]


def test_it_opens_with_the_counts_by_verdict(database, capsys):
    first, *_ = audit(capsys, database).splitlines()
    assert first.startswith("Measured, by our runs: ")
    counts = dict(part.split(" ", 1)[::-1] for part in first.split(": ")[1].split(", "))
    assert counts["reproduced"] == "1"
    assert sum(map(int, counts.values())) == 9


@pytest.mark.parametrize(
    "options, cells",
    [
        (["--table", "2"], {"t2-128", "t2-256", "t2-unnamed"}),
        (["--verdict", "reproduced"], {"t1-plain"}),
        (["--table", "1", "--verdict", "not run at paper scale"],
         {"t1-fancy", "t1-web", "t1-plain-web"}),
        (["--scale", "smoke", "--table", "1"], {"t1-plain", "t1-fancy", "t1-web", "t1-plain-web"}),
    ],
)  # fmt: skip
def test_filters(database, capsys, options, cells):
    rows = json.loads(audit(capsys, database, "--json", *options))
    assert {row["cell_id"] for row in rows} == cells
    if "--scale" in options:
        assert {row["scale"] for row in rows} == {"smoke"}


def test_experiments_claims_and_contradictions_are_asked_for(paper_database, capsys):
    def ask(*options):
        return json.loads(audit(capsys, paper_database, "--json", *options))

    e06 = ask("--experiment", "E06")
    assert {row["experiment"] for row in e06} == {"E06"}
    assert {"t02.deltanet-1p2of5.ppl"} < {row["cell_id"] for row in e06}
    claims = ask("--claims")
    assert {row["claim_id"] for row in claims} == {c.id for c in load_claims(load_paper())}
    assert {row["outcome"] for row in claims} == {"not run"}
    ranking = next(row for row in claims if row["claim_id"] == "cosmo-ranking")
    assert ranking["needs"] == "5 training runs, 74.7B tokens"
    paired = next(row for row in claims if row["claim_id"] == "selective-over-uniform")
    assert paired["needs"].startswith("6 training runs, ")
    assert {row["experiment"] for row in ask("--claims", "--experiment", "E13")} == {"E13"}
    wrong = ask("--contradictions")
    assert {row["verdict"] for row in wrong} == {"contradicted"} and len(wrong) > 30
    assert all(row["reading"] and row["inputs"] for row in wrong)
    of_12 = ask("--contradictions", "--table", "12")
    assert of_12 and len(of_12) < len(wrong)
    places = [(row["place"], *(source["place"] for source in row["inputs"])) for row in of_12]
    assert all(any("Table 12" in place for place in found) for found in places)


def test_the_terminal_shows_claims_and_contradictions_with_their_reading(paper_database, capsys):
    text = " ".join(audit(capsys, paper_database).split())
    assert re.search(r"The paper contradicts itself in \d+ checks", text)
    assert re.search(r"Claims at scale paper: \d+ not run", text)
    claims = " ".join(audit(capsys, paper_database, "--claims", "--experiment", "E09").split())
    assert "5 training runs" in claims and "not run" in claims
    wrong = " ".join(audit(capsys, paper_database, "--contradictions", "--table", "12").split())
    assert "5.7: 9.7×" in wrong and "10.19" in wrong


def test_the_terminal_table_shows_reported_ours_and_verdict(database, capsys):
    text = " ".join(audit(capsys, database, "--table", "1").split())
    assert "30.00 ± 0.05 30.02" in text and "reproduced" in text


@pytest.mark.parametrize(
    "options", [["--table", "9"], ["--verdict", "wrong"], ["--experiment", "E1"]]
)
def test_an_unknown_filter_names_the_choices(database, capsys, options):
    assert main(["audit", "--db", database, *options]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and (
        "1, 2, text" in err or "reproduced" in err or "X1, X2" in err
    )


def test_no_database_says_the_way_out(tmp_path, capsys):
    assert main(["audit", "--db", str(tmp_path / "absent.duckdb")]) == 2
    err = capsys.readouterr().err
    assert "snakemake" in err and "mol store build" in err and len(err.splitlines()) == 1


def test_it_starts_fast_and_without_torch(database):
    code = (
        "import sys; from mol.cli import main; main(sys.argv[1:]);"
        "print({'torch', 'pandas', 'mlflow', 'pyarrow'} & sys.modules.keys(), file=sys.stderr)"
    )
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code, "audit", "--db", database], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stderr.strip() == "set()"
    assert time.monotonic() - start < 10  # 0.4 s of work; the bound allows for a busy machine
