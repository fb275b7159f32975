"""`mol export`: a folder that loads where `mol` is not installed, and computes the same."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from small_runs import FAMILIES, drawn, export
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


def test_generation_stops_at_a_string(exported):
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    batch = tokenizer(["the river"], return_tensors="pt")

    def written(**options) -> str:
        ids = model.generate(**batch, max_new_tokens=20, do_sample=False, **options)
        return tokenizer.decode(ids[0, batch.input_ids.shape[1] :])

    whole = written()
    stop = whole[len(whole) // 2 :][:3]
    text = written(stop_strings=[stop], tokenizer=tokenizer)
    assert len(text) < len(whole) and whole.startswith(text) and stop in text


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
