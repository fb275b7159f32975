"""Hostile input: exit code 2, one line that names it, no traceback, nothing written or lost."""

import json
import os
import subprocess
import sys

import pytest
from hostile import (
    CONFIGURATIONS,
    DEFINITIONS,
    MODELS,
    NO_FILES,
    RAW_SPECIFICATIONS,
    READERS,
    SLIPS,
    SPECIFICATIONS,
    TEXTS,
    WORDS,
)
from made_up_paper import write_paper

from mol.cli import main
from mol.plan.build import plan

TEXT_SPEC = {
    "corpus": "fineweb_edu",
    "source": {"kind": "file", "train": "t.txt"},
    "tokenizer": "bpe",
    "vocab_size": 300,
    "layout": {"kind": "packed"},
}


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """A function that gives `mol` these arguments in a folder of its own; returns the one line."""
    monkeypatch.chdir(tmp_path)

    def files():
        return {
            path: path.read_bytes() if path.is_file() and not path.is_symlink() else None
            for path in tmp_path.rglob("*")
            if path.is_symlink() or not path.is_dir()
        }

    def call(*argv):
        before = files()
        capsys.readouterr()
        try:
            code = main(list(argv))
        except SystemExit as stopped:
            code = stopped.code
        out, err = capsys.readouterr()
        assert code == 2 and out == "", (code, out)
        assert err.strip() and err.count("\n") == 1 and err.startswith("mol"), err
        assert "Traceback" not in err and len(err) < 2200
        assert err.rstrip("\n").isprintable(), "no control characters from names or values"
        assert files() == before, "nothing written, nothing lost"
        return err

    call.folder = tmp_path
    return call


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configuration(refused, name):
    put(refused.folder / "c.yaml", CONFIGURATIONS[name])
    assert "c.yaml: " in refused("plan", "--config", "c.yaml")


def test_a_configuration_that_is_no_file_is_not_taken_for_none(refused):
    put(refused.folder / "config/config.yaml", lambda path: path.mkdir())
    assert "config/config.yaml: " in refused("plan")


@pytest.mark.parametrize("content, words, meant", SLIPS, ids=[slip[2] for slip in SLIPS])
def test_a_slip_is_told_what_was_meant(refused, content, words, meant):
    put(refused.folder / "f", content)
    assert f"did you mean {meant}?" in refused(*words)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_not_opened(refused, reader, kind):
    words = READERS[reader]
    name = next(word for word in words if word.partition(".")[0] == "f")
    NO_FILES[kind](refused.folder / name)
    assert f"{name}: " in refused(*words)


@pytest.mark.parametrize(
    "words",
    [["store", "build", "--db", "f"], ["report", "--audit-page", "f"]],
    ids=lambda words: words[0],
)
def test_a_device_is_not_replaced_by_a_file(refused, words):
    os.mkfifo(refused.folder / "f")  # as /dev/null is, but of this test alone
    assert "f: is a device or a pipe" in refused(*words)


@pytest.mark.parametrize("words", [["--runs", "f"], ["--records", "f"]], ids=["runs", "records"])
def test_records_lie_in_a_folder(refused, words):
    put(refused.folder / "f", "no folder")
    assert "f: is no folder" in refused("store", "build", "--db", "mol.duckdb", *words)


@pytest.fixture(scope="module")
def specification():
    return next(p.spec for p in plan("smoke") if p.spec.condition == "mol-top3")


@pytest.mark.parametrize("path, value", SPECIFICATIONS, ids=lambda part: repr(part)[:40])
def test_specification(refused, specification, path, value):
    raw = specification.model_dump(mode="json")
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    put(refused.folder / "s.json", json.dumps(raw))
    assert "s.json: " in refused("train", "--spec", "s.json")


@pytest.mark.parametrize("command", ["train", "eval", "bench"])
@pytest.mark.parametrize("name", RAW_SPECIFICATIONS)
def test_specification_file(refused, name, command):
    put(refused.folder / "s.json", RAW_SPECIFICATIONS[name])
    assert "s.json: " in refused(command, "--spec", "s.json")


@pytest.mark.parametrize("file, name", [(file, name) for file in TEXTS for name in TEXTS[file]])
def test_text(refused, file, name):
    spec = TEXT_SPEC | {"source": {"kind": "file", "train": file}}
    put(refused.folder / "s.json", json.dumps(spec))
    put(refused.folder / file, TEXTS[file][name])
    line = refused("data", "--spec", "s.json", "--out", "corpus")
    assert file in line or "too little text" in line


@pytest.mark.parametrize("out", ["s.json", "s.json/x", "/proc/x", "/dev/null", "x" * 300, "kept"])
def test_a_corpus_goes_to_a_folder_of_its_own(refused, out):
    put(refused.folder / "s.json", json.dumps(TEXT_SPEC))
    put(refused.folder / "t.txt", "\n\n".join(f"{i} words of text {i * i}" for i in range(400)))
    put(refused.folder / "kept/precious.txt", "somebody's")
    refused("data", "--spec", "s.json", "--out", out)


@pytest.mark.parametrize(
    "file, old, new",
    [(file, *change) for file in DEFINITIONS for change in DEFINITIONS[file]],
    ids=lambda part: repr(part)[:30],
)
def test_definition(refused, file, old, new):
    paper = write_paper(refused.folder / "paper")
    content = (paper / file).read_text()
    assert old in content
    (paper / file).write_text(content.replace(old, new, 1))
    line = refused("store", "build", "--paper", "paper", "--db", "d/mol.duckdb")
    assert "paper" in line


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\0", b"[[[[", None, "a folder"])
@pytest.mark.parametrize("file", DEFINITIONS)
def test_definition_file(refused, file, content):
    path = write_paper(refused.folder / "paper") / file
    path.unlink()
    if content == "a folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    assert "paper" in refused("store", "build", "--paper", "paper", "--db", "d/mol.duckdb")


@pytest.mark.parametrize("name", MODELS)
def test_model(refused, name):
    put(refused.folder / "m.toml", f"vocab_size = 100\n{MODELS[name]}\n")
    line = refused("counts", "--config", "m.toml")
    assert "m.toml: " in line or "out of memory" in line


@pytest.mark.parametrize("words", WORDS, ids=lambda words: repr(" ".join(words))[:60])
def test_words(refused, words):
    refused(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--config", "bomb.yaml"],
        ["plan", b"--config", b"\xff\n\xfe"],
        ["status", "--results", "results", "--config", "/dev/zero"],
    ],
    ids=["bomb", "no text", "device"],
)
def test_in_a_process_of_its_own(tmp_path, words):
    (tmp_path / "bomb.yaml").write_text(CONFIGURATIONS["YAML bomb"])
    done = subprocess.run(
        [sys.executable, "-m", "mol", *words], cwd=tmp_path, capture_output=True, timeout=60
    )
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.count(b"\n") == 1 and b"Traceback" not in done.stderr, done.stderr
