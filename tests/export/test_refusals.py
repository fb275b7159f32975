"""What `mol export` refuses: one line, exit code 2, and what was there is kept."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import FAMILIES, export

from mol.cli import main

HYBRID = FAMILIES["split-rms-top-routed-linear-shared-deltanet"]


def copied(results, tmp_path) -> Path:
    """A run of its own to damage, in a results folder of its own."""
    folder = tmp_path / "results"
    folder.mkdir(parents=True)
    (folder / "data").symlink_to(results.folder / "data")
    run = results.run(HYBRID)
    target = folder / "runs" / "smoke" / run.name
    target.mkdir(parents=True)
    for path in run.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def edit_record(run: Path, change) -> None:
    record = json.loads((run / "record.json").read_text("utf-8"))
    change(record)
    (run / "record.json").write_text(json.dumps(record), "utf-8")


def other_weights(run: Path, change, metadata=None) -> None:
    path = run / "model.safetensors"
    pins = {"tokenizer_sha256": json.loads((run / "record.json").read_text("utf-8"))["provenance"]
            ["data"]["tokenizer_sha256"]}  # fmt: skip
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata=pins if metadata is None else metadata)


DAMAGE = {
    "no record": (lambda run: (run / "record.json").unlink() or (run / "state.pt").touch(),
                  "no finished run"),
    "no weights": (lambda run: (run / "model.safetensors").unlink(), "model.safetensors"),
    "cut weights": (lambda run: os.truncate(run / "model.safetensors", 5000), "unreadable"),
    "a weight missing": (lambda run: other_weights(run, lambda w: w.pop("norm.weight")),
                         "norm.weight"),
    "another shape": (
        lambda run: other_weights(run, lambda w: w.update({"norm.weight": torch.ones(3)})),
        "norm.weight",
    ),
    "a number lost": (
        lambda run: other_weights(run, lambda w: w["norm.weight"].fill_(torch.nan)),
        "norm.weight holds NaN",
    ),
    "another tokenizer": (
        lambda run: other_weights(run, lambda w: None, {"tokenizer_sha256": "0" * 64}),
        "000000000000",
    ),
    "another model": (
        lambda run: edit_record(run, lambda r: r["spec"]["model"].update(n_layers=3)), "run_id"),
    "unknown key": (
        lambda run: edit_record(run, lambda r: r["spec"]["model"].update(n_layer=3)), "n_layer"),
    "wrong shape": (
        lambda run: edit_record(run, lambda r: r["spec"]["model"]["layer"].update(top_k=99)),
        "top_k"),
    "broken record": (lambda run: (run / "record.json").write_text("{"), "record.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_broken_run_ends_in_one_line(results, tmp_path, capsys, name):
    run = copied(results, tmp_path)
    damage, message = DAMAGE[name]
    damage(run)
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error
    assert not (tmp_path / "out").exists()


def test_stored_architectures_are_checked(results, tmp_path, capsys):
    for config, message in (
        ({}, "vocab_size"),
        (HYBRID.model_dump(mode="json") | {"depth": 3}, "depth"),
        (HYBRID.model_dump(mode="json") | {"d_model": 100}, "does not fit"),
    ):
        run = copied(results, tmp_path / message)
        metadata = {"tokenizer_sha256": results.meta.tokenizer_sha256, "config": json.dumps(config)}
        other_weights(run, lambda weights: None, metadata)
        (run / "record.json").unlink()
        assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and message in error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", "no train run 'gone'"),
        ("mol-top3", "names 3 runs"),
        ("dense-softmax-85m", "not trained yet"),
        ("{file}", "not a folder"),
        ("{empty}", "no finished run"),
    ],
)
def test_an_unknown_run_ends_in_one_line(results, tmp_path, capsys, name, message):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    name = name.format(file=tmp_path / "file", empty=tmp_path / "empty")
    assert export(results, name, "--to", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def test_a_folder_with_other_files_is_left_alone(results, tmp_path, capsys):
    run = results.run(HYBRID)
    out = tmp_path / "out"
    out.mkdir()
    assert export(results, run, "--to", out) == 0  # an empty folder is used
    (out / "thesis.tex").write_text("years of work")
    assert export(results, run, "--to", out) == 2
    assert "thesis.tex" in capsys.readouterr().err
    assert (out / "thesis.tex").exists()
    assert export(results, run, "--to", out / "thesis.tex") == 2
    assert "a file" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["README.md", "model.safetensors", "export.json"])
def test_an_export_that_was_changed_is_left_alone(results, tmp_path, capsys, name):
    """A card that was edited, weights that were trained on, an index of something else."""
    run, out = results.run(HYBRID), tmp_path / "out"
    assert export(results, run, "--to", out) == 0
    assert export(results, run, "--to", out) == 0  # as it was written it is replaced
    capsys.readouterr()
    if name == "export.json":
        for path in out.iterdir():
            path.unlink()
    (out / name).write_text('{"mine": 1}')
    assert export(results, run, "--to", out) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and name in error and "give a new folder" in error
    assert (out / name).read_text() == '{"mine": 1}'


def test_a_full_disk_leaves_the_earlier_export(results, tmp_path, capsys):
    run, out = results.run(HYBRID), tmp_path / "out"
    assert export(results, run, "--to", out) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, limits[1]))  # below the weights' size
    try:
        assert export(results, run, "--to", out) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cannot be written" in error
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
