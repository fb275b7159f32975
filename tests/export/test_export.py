"""`mol export`: a folder that loads where `mol` is not installed, and one line for bad input."""

import ast
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from small_runs import FAMILIES, drawn
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from mol.cli import main
from mol.data.tokenizers import GPT2_EOS, gpt2_tokenizer, load_tokenizer
from mol.export import MoLForCausalLM, bundle
from mol.export.write import INDEX, hf_tokenizer
from mol.store.record import load_record

HYBRID = FAMILIES["split-rms-top-routed-linear-shared-deltanet"]

# What a user's Python does who has neither this package nor any kernel library.
STRANGER = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mol", "triton", "fla", "tilelang"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

with torch.no_grad():
    for folder in sys.argv[1:]:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        ids = torch.arange(2, 26).view(2, 12)
        texts = ["the river", "a quick brown fox jumps"]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        found = {
            "logits": model(ids).logits,
            "text": model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None),
            "batch": model.generate(**batch, max_new_tokens=8, do_sample=False),
        }
        assert type(model).__module__.startswith("transformers_modules.")
        torch.save(found, f"{folder}/found.pt")
        model.save_pretrained(f"{folder}-again")
        again = AutoModelForCausalLM.from_pretrained(f"{folder}-again", trust_remote_code=True)
        assert torch.equal(again(ids).logits, found["logits"])
assert "mol" not in sys.modules
"""


def export(results, *arguments) -> int:
    return main(["export", *map(str, arguments), "--results", str(results.folder)])


@pytest.fixture(scope="module")
def exported(results, tmp_path_factory):
    """An export of one family, whose files tests only read."""
    run = results.run(HYBRID)
    folder = tmp_path_factory.mktemp("exports") / "hybrid"
    assert export(results, run.name, "--to", folder) == 0
    return folder


def test_every_family_loads_and_computes_the_same_without_this_package(results, tmp_path):
    folders = {}
    for name, model in FAMILIES.items():
        folders[name] = tmp_path / name
        run = results.run(model, condition=name)
        assert export(results, run, "--to", folders[name]) == 0
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, *map(str, folders.values())],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ids = torch.arange(2, 26).view(2, 12)
    for name, folder in folders.items():
        found = torch.load(folder / "found.pt", weights_only=True)
        plain = drawn(FAMILIES[name])
        with torch.no_grad():
            assert torch.equal(found["logits"], plain.logits(plain(ids).hidden)), name
            local = AutoModelForCausalLM.from_pretrained(folder)  # registered, so it asks nothing
            text = local.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert type(local) is MoLForCausalLM
        assert torch.equal(found["text"], text), name
        assert found["batch"].shape[0] == 2


def test_the_files_of_an_export(results, exported, capsys):
    index = json.loads((exported / INDEX).read_text("utf-8"))
    names = {path.name for path in exported.iterdir()}
    assert names == set(index["files"]) | {INDEX}
    expected = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    assert expected | {"tokenizer.json", "tokenizer_config.json", "modeling_mol.py"} <= names
    config = json.loads((exported / "config.json").read_text("utf-8"))
    assert config["model_type"] == "mol" and config["architectures"] == ["MoLForCausalLM"]
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_mol.MoLForCausalLM"
    assert (config["eos_token_id"], config["pad_token_id"]) == (1, 0)
    generation = json.loads((exported / "generation_config.json").read_text("utf-8"))
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (1, 0)
    stored = load_file(exported / "model.safetensors")
    trained = drawn(HYBRID).state_dict()
    assert {name.removeprefix("model.") for name in stored} == set(trained)
    assert all(torch.equal(stored[f"model.{name}"], weight) for name, weight in trained.items())


def test_the_tokenizer_is_the_runs_own(results, exported):
    ours, theirs = load_tokenizer(results.corpus), AutoTokenizer.from_pretrained(exported)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (results.meta.eos_id, 0)
    for text in ("", "the river", "  a fox\n\njumps ", "<eos> and <pad>", "Répète “42” 🦊"):
        ids = ours.encode(text).ids
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text
    batch = theirs(["the", "the quick brown fox"], padding=True)
    assert batch["attention_mask"][0][0] == 0 and set(batch) == {"input_ids", "attention_mask"}


def test_end_of_text_pads_where_there_is_no_padding_token(results, tmp_path):
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, GPT2_EOS])}
    gpt2_tokenizer(json.dumps(vocabulary).encode(), b"#version").save(
        str(tmp_path / "tokenizer.json")
    )
    meta = results.meta.model_copy(update={"eos_id": 256, "pad_id": None})
    tokenizer = hf_tokenizer(tmp_path, meta)
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for made in (tokenizer, loaded):
        assert (made.eos_token_id, made.pad_token_id, made.bos_token) == (256, 256, None)
        batch = made(["ab", "abcd"], padding=True)
        assert batch["input_ids"][0][:2] == [256, 256]
        assert batch["attention_mask"][0] == [0, 0, 1, 1]


def test_the_card_holds_the_record(results, exported):
    text = (exported / "README.md").read_text("utf-8")
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "transformers"
    record = load_record(results.run(HYBRID) / "record.json")
    for part in (
        "41.25", "pad none", "context 32", "split test", "rule total", record.hardware.name,
        record.provenance.code_sha256, record.provenance.git_commit or "not recorded",
        "text: made up",
        results.meta.source.license, "trust_remote_code=True", "reproduce none",
    ):  # fmt: skip
        assert part in body, part
    full = body.split("```json\n")[1].split("```")[0]
    assert json.loads(full)["run_id"] == record.run_id


def test_no_exported_file_needs_this_package_or_a_kernel_library():
    files = bundle.flat_sources()
    assert len(files) > 15
    for name, text in files.items():
        tree = ast.parse(text)
        guarded = {
            id(node) for block in ast.walk(tree) if isinstance(block, ast.Try)
            for node in ast.walk(block)
        }  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and f"{node.module}.py" in files, (name, node.module)
            elif isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in guarded:
                first = (
                    [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
                )
                for root in (module.split(".")[0] for module in first):
                    assert root in bundle.INSTALLED | sys.stdlib_module_names, (name, root)
        assert '"mol::' not in text and "torch.ops.mol." not in text
    assert "fcntl" not in files["base.py"]  # the part of it that loads needs no Unix


def test_transformers_finds_every_file_of_an_export(exported):
    from transformers.dynamic_module_utils import check_imports, get_relative_import_files

    for file in exported.glob("*.py"):
        check_imports(file)  # as for a model on the hub: what a file needs must be installed
    found = {Path(file).name for file in get_relative_import_files(exported / "modeling_mol.py")}
    assert found | {"modeling_mol.py"} == {path.name for path in exported.glob("*.py")}


def test_weights_alone_are_exported_with_the_tokenizer_they_name(results, tmp_path, capsys):
    alone = tmp_path / "alone"
    alone.mkdir()
    run = results.run(HYBRID)
    (alone / "model.safetensors").write_bytes((run / "model.safetensors").read_bytes())
    assert export(results, alone, "--to", tmp_path / "out", "--json") == 0
    index = json.loads(capsys.readouterr().out)
    assert index["run_id"] == run.name and index["folder"] == str(tmp_path / "out")
    assert "weights without their run" in (tmp_path / "out/README.md").read_text("utf-8")
    first = (tmp_path / "out/model.safetensors").read_bytes()
    # Anywhere else the corpus has to be named; an earlier export is replaced.
    arguments = [str(alone), "--to", str(tmp_path / "out"), "--results", str(tmp_path)]
    assert main(["export", *arguments]) == 2
    assert "--data" in capsys.readouterr().err
    assert main(["export", *arguments, "--data", str(results.corpus)]) == 0
    assert (tmp_path / "out/model.safetensors").read_bytes() == first
    assert not list(tmp_path.glob(".out*"))


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


def test_kernels_of_an_export_register_beside_this_packages_own(exported, tmp_path):
    """With Triton at hand every file of an export imports, in the process that also has `mol`."""
    pytest.importorskip("triton")
    (tmp_path / "flat").symlink_to(exported)
    names = sorted(path.stem for path in exported.glob("*.py"))
    code = "\n".join(
        [
            "import importlib, mol.export.bundle as bundle",
            "for module in bundle.closure(): importlib.import_module(module)",
            f"for name in {names}: importlib.import_module(f'flat.{{name}}')",
        ]
    )
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
