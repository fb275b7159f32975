"""Corrupt, cut off, old and foreign files: refused by name with the way out, the rest is kept."""

import io
import json
import os
import pickle
import shutil
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from made_up_paper import write_paper
from processes import call
from safetensors.torch import save_file
from synthetic import write_train
from victims import command

from mol.base import UserError
from mol.cli import main
from mol.data.loader import TokenBatches
from mol.data.packing import prepare
from mol.evaluate.pairs import HEAD, IDS, Head, score_file
from mol.model.transformer import LanguageModel
from mol.plan.build import plan
from mol.plan.hashes import source_hash
from mol.plan.select import corpus_folder
from mol.plan.spec import TrainSpec
from mol.store.export import digests, export
from mol.train.checkpoint import STATE, WEIGHTS, load_state, load_weights

CUT = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "NUL": lambda content: bytes(len(content)),
    "another kind": lambda content: b"\x80\x04\x95 not what it says it is " * 9,
    "one byte": lambda content: b"{",
}


class Touch:
    """Unpickled, it creates a file: what a checkpoint from elsewhere could do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mknod, (str(self.path),)


@pytest.fixture(scope="module")
def paper(tmp_path_factory):
    return write_paper(tmp_path_factory.mktemp("paper"))


@pytest.fixture
def store(tmp_path, paper, capsys):
    """Two runs; `build()` loads them and returns the refusals by file, with the lines printed."""
    specs = [p.spec for p in plan("smoke", folder=paper) if p.spec.kind == "train"][:2]
    folders = [write_train(tmp_path / "runs", spec, 3.0) for spec in specs]
    options = ["--db", str(tmp_path / "db" / "mol.duckdb"), "--runs", str(tmp_path / "runs")]
    options += ["--records", str(tmp_path / "records"), "--paper", str(paper), "--json"]

    def build():
        assert main(["store", "build", *options]) == 0
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert all(line.startswith("mol store: refused ") for line in lines), err
        return json.loads(out), lines

    build.bad, build.good = folders
    build.options, build.db = options, tmp_path / "db" / "mol.duckdb"
    return build


def refuses(store, file, runs, *words):
    report, lines = store()
    assert len(lines) == 1 and report["refused"] == 1, lines
    assert f"{store.bad.name}/{file}: " in lines[0] or lines[0].count(store.bad.name), lines
    assert all(word in lines[0] for word in words), lines
    assert report["runs"] == runs, "the rest is ingested"


@pytest.mark.parametrize("fault", CUT)
def test_a_damaged_record(store, fault):
    path = store.bad / "record.json"
    path.write_bytes(CUT[fault](path.read_bytes()))
    refuses(store, "record.json", 1, "delete its folder to rerun")


@pytest.mark.parametrize("fault", CUT)
def test_a_damaged_curve(store, fault):
    path = store.bad / "curve.parquet"
    path.write_bytes(CUT[fault](path.read_bytes()))
    refuses(store, "curve.parquet", 2, "delete the folder to rerun")


def test_a_flipped_bit_in_a_curve(store, uncut):
    content = bytearray((uncut.run / "curve.parquet").read_bytes())
    content[len(content) // 3] ^= 1
    (store.bad / "curve.parquet").write_bytes(content)
    refuses(store, "curve.parquet", 2, "delete the folder to rerun")


RECORDS = [
    ({"schema_version": 0}, "schema_version is 0, this code reads 1"),
    ({"schema_version": 2}, "schema_version is 2"),
    ({"schema_version": None}, "schema_version is None"),
    ({"schema_version": True}, "schema_version is True"),
    ({"surprise": 1}, "surprise"),
    ({"run_id": "../../elsewhere"}, "is not its spec's"),
    ({"status": "done"}, "status"),
    ({"wall_s": -1}, "wall_s"),
    ({"started": "yesterday"}, "started"),
    ({"metrics": [{}]}, "metrics.0"),
    ({"spec": {}}, "spec"),
    ({"hardware": {"device": "abacus"}}, "hardware.device"),
    ({"notes": [1]}, "notes.0"),
]


@pytest.mark.parametrize("changes, words", RECORDS, ids=lambda part: str(part)[:40])
def test_an_old_or_foreign_record(store, changes, words):
    path = store.bad / "record.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refuses(store, "record.json", 1, words, "delete its folder to rerun")


FIGURES = [
    {"value": float("nan")}, {"value": float("-inf")}, {"value": "3"[:0]}, {"unit": "furlong"},
    {"n": -1}, {"n": 10**30}, {"stderr": -1}, {"name": ""}, {"name": "a\0b"},
    {"name": "x" * 100_000}, {"name": "\ud800"}, {"labels": {"a": [1]}},
    {"labels": {"a": 10**400}}, {"protocol": {"pad": "maybe"}},
]  # fmt: skip


@pytest.mark.parametrize("changes", FIGURES, ids=lambda part: repr(part)[:40])
def test_an_impossible_figure(store, changes):
    path = store.bad / "record.json"
    record = json.loads(path.read_text())
    record["metrics"][0] |= changes
    path.write_text(json.dumps(record))
    refuses(store, "record.json", 1, "delete its folder to rerun")


def test_what_a_record_says_does_not_steer_the_terminal(store, capsys):
    path = store.bad / "record.json"
    record = json.loads(path.read_text())
    evil = "\x1b]0;title\x07 \x1b[31m \u202e \r"
    record |= {"status": "not run", "reason": evil, "notes": [evil]}
    record["hardware"]["name"] = evil
    path.write_text(json.dumps(record))
    store()
    query = ["store", "query", "SELECT reason, hardware, notes FROM runs", "--db", str(store.db)]
    for argv in (query, ["audit", "--db", str(store.db)]):
        assert main(argv) == 0
        assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))


def test_a_key_that_stands_twice(store):
    path = store.bad / "record.json"
    path.write_text(path.read_text().replace('"run_id"', '"run_id": "other", "run_id"', 1))
    refuses(store, "record.json", 1, "'run_id' stands twice")


@pytest.mark.parametrize("name, runs", [("record.json", 1), ("curve.parquet", 2)])
@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file(store, tmp_path, name, runs, kind):
    path = store.bad / name
    path.rename(tmp_path / name)
    if kind == "link":
        path.symlink_to(tmp_path / name)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    refuses(store, name, runs)


def test_a_linked_folder(store, tmp_path):
    store.bad.rename(tmp_path / "elsewhere")
    store.bad.symlink_to(tmp_path / "elsewhere")
    refuses(store, "", 1, "is a link; copy what it leads to here")


@pytest.mark.parametrize("name", ["a\nb", "\udcff", "\u202e", "=1+1"])
def test_a_copy_under_a_strange_name(store, name):
    shutil.copytree(store.bad, store.bad.parent / name)
    report, lines = store()
    assert report["runs"] == 2 and len(lines) == 1 and lines[0].isprintable()
    assert "move it there or delete it" in lines[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"value": lambda v: [float("inf"), *v[1:]]},
        {"step": lambda v: [-1, *v[1:]]},
        {"step": lambda v: [v[-1]] * len(v)},
        {"name": lambda v: [None, *v[1:]]},
        {"step": lambda v: ["one"] * len(v)},
        {"value": lambda v: [[x] for x in v]},
    ],
    ids=["infinite", "negative step", "one step", "no name", "text", "lists"],
)
def test_a_curve_of_other_values(store, changes):
    path = store.bad / "curve.parquet"
    columns = pq.read_table(path).to_pydict()
    columns |= {name: change(columns[name]) for name, change in changes.items()}
    pq.write_table(pa.table(columns), path)
    refuses(store, "curve.parquet", 2, "delete the folder to rerun")


@pytest.mark.parametrize("columns", [{"a": [1]}, {"step": []}, None])
def test_a_curve_of_other_columns(store, columns):
    path = store.bad / "curve.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 0) if columns is None else pa.table(columns), path)
    refuses(store, "curve.parquet", 2, "delete the folder to rerun")


@pytest.mark.parametrize("fault", CUT)
def test_a_damaged_database_is_built_again(store, tmp_path, capsys, fault):
    store()
    first = digests(export(store.db, tmp_path / "first", "csv"))
    store.db.write_bytes(CUT[fault](store.db.read_bytes()))
    commands = [["store", "export", "--out", str(tmp_path / "out")]]
    if fault != "cut off":  # what lies before the cut can still be read
        commands += [["store", "query", "SELECT max(value) FROM curves"], ["audit"], ["report"]]
    for argv in commands:
        assert main([*argv, "--db", str(store.db)]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and "run `mol store build`" in line, line
    store()
    assert digests(export(store.db, tmp_path / "second", "csv")) == first


@pytest.fixture(scope="module")
def started(tmp_path_factory, uncut):
    """A run that was stopped at step 6, to be copied."""
    from tiny import Place

    folder = tmp_path_factory.mktemp("started")
    place = Place(folder / "results", uncut)
    done = call(folder, command, place.train("--stop-after", "6"))
    assert done.code == 0, done.err
    return place


@pytest.fixture
def stopped(place, started):
    """`place` with the checkpoint of a run stopped at step 6."""
    place.run.mkdir(parents=True)
    shutil.copy(started.run / STATE, place.run / STATE)
    return place


def refuses_to_train(place, capsys, *words):
    kept = (place.run / STATE).read_bytes() if (place.run / STATE).is_file() else None
    assert main(place.train()) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and STATE in line and "delete it" in line, line
    assert all(word in line for word in words), line
    assert kept is None or (place.run / STATE).read_bytes() == kept
    assert not (place.run / "record.json").exists()


@pytest.mark.parametrize("fault", CUT)
def test_a_damaged_checkpoint(stopped, uncut, capsys, fault):
    path = stopped.run / STATE
    path.write_bytes(CUT[fault](path.read_bytes()))
    refuses_to_train(stopped, capsys, "unreadable checkpoint")


def test_a_flipped_bit_in_a_checkpoint_and_the_way_out(stopped, uncut, tmp_path, capsys):
    path = stopped.run / STATE
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    content[largest.header_offset + len(content) // 50] ^= 1
    path.write_bytes(content)
    refuses_to_train(stopped, capsys)
    path.unlink()
    done = call(tmp_path, command, stopped.train())
    assert done.code == 0 and stopped.curve() == uncut.curve


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda s: s | {"run_id": "another"}, "belongs to run 'another'"),
        (lambda s: s | {"code_sha256": "0" * 64}, "was written by other code"),
        (lambda s: {k: v for k, v in s.items() if k != "optimizer"}, "does not fit"),
        (lambda s: {k: v for k, v in s.items() if k != "curve"}, "does not fit"),
        (lambda s: s | {"batches": s["batches"] | {"shard_sha256": "0"}}, "shard_sha256"),
        (lambda s: s | {"model": {}}, "does not fit"),
        (lambda s: s | {"rng": "dice"}, "does not fit"),
        (lambda s: s | {"step": s["step"] + 1}, "does not fit"),
        (lambda s: [s], "belongs to run None"),
    ],
    ids=["run", "code", "optimizer", "curve", "data", "model", "rng", "step", "list"],
)
def test_a_foreign_or_old_checkpoint(stopped, capsys, change, words):
    path = stopped.run / STATE
    state = torch.load(path, weights_only=True) | {"code_sha256": source_hash("train")}
    torch.save(change(state), path)
    refuses_to_train(stopped, capsys, words)


def test_a_folder_for_a_checkpoint(stopped, capsys):
    (stopped.run / STATE).unlink()
    (stopped.run / STATE).mkdir()
    refuses_to_train(stopped, capsys)


@pytest.mark.parametrize("form", ["torch", "pickle"])
def test_a_malicious_checkpoint_runs_no_code(stopped, tmp_path, capsys, form):
    trap = tmp_path / "taken"
    state = {"run_id": stopped.spec.run_id, "model": Touch(trap)}
    if form == "torch":
        torch.save(state, stopped.run / STATE)
    else:
        (stopped.run / STATE).write_bytes(pickle.dumps(state))
    refuses_to_train(stopped, capsys, "unreadable checkpoint")
    with pytest.raises(UserError):
        load_state(stopped.run, stopped.spec.run_id)
    assert not trap.exists()
    if form == "torch":  # the trap works
        torch.load(stopped.run / STATE, weights_only=False)
    else:
        pickle.loads((stopped.run / STATE).read_bytes())
    assert trap.exists()


def test_foreign_and_malicious_weights(uncut, tmp_path):
    model = LanguageModel(uncut.spec.model)
    sha = json.loads((uncut.corpus / "meta.json").read_text())["tokenizer_sha256"]
    load_weights(uncut.run, model, sha, uncut.spec.run_id)
    with pytest.raises(UserError, match="belongs to run .*not 'another'"):
        load_weights(uncut.run, model, sha, "another")
    trap, path = tmp_path / "taken", tmp_path / WEIGHTS
    other = {"tokenizer_sha256": sha, "run_id": uncut.spec.run_id}
    whole = (uncut.run / WEIGHTS).read_bytes()
    torch.save({"embedding.weight": Touch(trap)}, path)
    contents = [path.read_bytes(), pickle.dumps(Touch(trap))]
    contents += [change(whole) for change in CUT.values()]
    contents.append((2**60).to_bytes(8, "little") + whole[8:])
    contents.append(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{WEIGHTS}: unreadable weights.*retrain"):
            load_weights(tmp_path, model, sha)
    assert not trap.exists()
    save_file({"embedding.weight": torch.zeros(3, 3)}, path, metadata=other)
    with pytest.raises(UserError, match="does not fit the run's model"):
        load_weights(tmp_path, model, sha)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=WEIGHTS):
        load_weights(tmp_path, model, sha)


def test_weights_of_another_type_are_refused(uncut, tmp_path):
    model = LanguageModel(uncut.spec.model)
    sha = json.loads((uncut.corpus / "meta.json").read_text())["tokenizer_sha256"]
    content = (uncut.run / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(content.replace(b'"F32"', b'"I32"', 1))
    with pytest.raises(UserError, match="other than fp32 weights"):
        load_weights(tmp_path, model, sha)


@pytest.mark.parametrize("name", ["train.bin", "tokenizer.json", "token_bytes.npy", WEIGHTS, STATE])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(place, uncut, tmp_path, name):
    beside = name in (WEIGHTS, STATE)
    corpus = corpus_folder(place.results, "smoke", place.spec.data.folder)
    path = (place.run if beside else corpus) / name
    if name == WEIGHTS:
        shutil.copytree(uncut.run, place.run)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    argv = place.train()
    if name == WEIGHTS:
        argv = ["export", str(place.run), "--to", str(tmp_path / "o")]
    done = call(tmp_path, command, argv)
    assert done.code == 2 and done.err.count("\n") == 1 and name in done.err, done


PAIRS = {
    "no options": {"context": [[1]]},
    "text": {"context": ["a"], "options": ["b"]},
    "beyond the vocabulary": {"context": [[5000]], "options": [[[1]]]},
    "negative": {"context": [[-1]], "options": [[[1]]]},
    "no context": {"context": [None], "options": [[[1]]]},
    "an empty context": {"context": pa.array([[]], IDS), "options": [[[1]]]},
    "an empty option": {"context": [[1]], "options": pa.array([[[]]], pa.list_(IDS))},
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_that_are_no_requests(tmp_path, name):
    head = Head(tokenizer_sha256="0" * 64, tasks=("piqa",), limit=None, items={})
    table = pa.table(PAIRS[name]).replace_schema_metadata({HEAD: head.model_dump_json()})
    pq.write_table(table, tmp_path / "pairs")
    with pytest.raises(UserError, match="pairs: .*write it again with `mol zeroshot pairs`"):
        score_file(tmp_path / "pairs", None, "0" * 64, 4096)


FILES = ("meta.json", "train.bin", "test.bin", "tokenizer.json", "token_bytes.npy")


@pytest.mark.parametrize("fault", CUT)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_corpus(place, capsys, name, fault):
    path = corpus_folder(place.results, "smoke", place.spec.data.folder) / name
    path.write_bytes(CUT[fault](path.read_bytes()))
    assert main(place.train()) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and name in line and "delete the folder" in line, line


def test_token_sizes_that_execute_code_are_not_read(place, tmp_path, capsys):
    trap = tmp_path / "taken"
    folder = corpus_folder(place.results, "smoke", place.spec.data.folder)
    np.save(folder / "token_bytes.npy", np.array([Touch(trap)], dtype=object), allow_pickle=True)
    assert main(place.train()) == 2
    assert "token_bytes.npy: absent or damaged" in capsys.readouterr().err
    assert not trap.exists()


def test_a_shard_named_outside_its_folder(place, tmp_path):
    folder = corpus_folder(place.results, "smoke", place.spec.data.folder)
    meta = json.loads((folder / "meta.json").read_text())
    meta["splits"]["train"]["file"] = "../../../../text.bin"
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="delete the folder"):
        TokenBatches(folder, "train", 15, 4, 0)


def test_a_corpus_of_another_specification(place, uncut):
    folder = corpus_folder(place.results, "smoke", place.spec.data.folder)
    raw = uncut.spec.model_dump() | {"data": uncut.spec.data.model_dump() | {"vocab_size": 299}}
    other = TrainSpec.model_validate(raw)
    with pytest.raises(UserError, match="prepared from another specification"):
        prepare(other.data, folder)
