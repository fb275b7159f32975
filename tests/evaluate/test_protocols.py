"""Every row of the protocol matrix against brute force, its counts, its units, its command."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from mol.base import UserError
from mol.cli import main
from mol.data.config import DataSpec, FileSource, PackedLayout, PaddedLayout, WheelSource
from mol.data.meta import load_meta
from mol.data.packing import prepare
from mol.evaluate.perplexity import evaluate_split
from mol.evaluate.protocols import LONGER, NO_RAW_TEXT, RECORDED, matrix_of, raw_shard
from mol.model.config import DenseLayer, ModelConfig
from mol.model.transformer import LanguageModel
from mol.plan.spec import EvalSpec, OptimSpec, TrainSpec
from mol.store.matrix import load_matrix
from mol.store.record import load_record
from mol.train.run import execute

CPU = torch.device("cpu")
T, LIMIT = 15, 5
LAYOUTS = {"padded": PaddedLayout(chunk=16, min_chunk=6), "packed": PackedLayout()}


def published(number):
    """A line of WikiText's kind: spaces around punctuation, @-@ inside words."""
    words = " ".join(f"λ{number * place % 53}" for place in range(1 + number % 5))
    return f"the well @-@ known {words} , and more"


def plain(number):
    return published(number).replace(" @-@ ", "-").replace(" ,", ",")


def corpus_of(folder, layout, line):
    for split, start in (("train", 0), ("validation", 500), ("test", 700)):
        lines = "\n\n".join(line(number) for number in range(start, start + 150))
        (folder / f"{split}.txt").write_text(lines, encoding="utf-8")
    files = {split: str(folder / f"{split}.txt") for split in ("train", "validation", "test")}
    data = DataSpec(
        corpus="wikitext103",
        source=FileSource(**files),
        tokenizer="bpe",
        vocab_size=270,
        layout=LAYOUTS[layout],
    )
    prepare(data, folder / "corpus")
    return folder / "corpus"


@pytest.fixture(scope="module", params=["padded", "packed"])
def scored(request, tmp_path_factory):
    """(layout, corpus folder, model, rows of the matrix)."""
    corpus = corpus_of(tmp_path_factory.mktemp(request.param), request.param, published)
    torch.manual_seed(0)
    layer = DenseLayer(n_heads=2, d_ff=16)
    model = LanguageModel(ModelConfig(vocab_size=270, d_model=16, n_layers=2, layer=layer))
    with torch.no_grad():
        model.embedding.weight *= 20  # far from uniform, so that every protocol has its own value
    rows, no_raw_text = matrix_of(model, corpus, T, "validation", LIMIT, CPU)
    assert no_raw_text == ""
    return request.param, corpus, model, rows


def pieces_of(layout, corpus, protocol):
    """The texts that are read alone, and which target ids do not count, from the shard itself."""
    meta = load_meta(corpus)
    ids = np.fromfile(corpus / "validation.bin", dtype="<u2").astype(int).tolist()
    if protocol.text == "raw":
        ids = raw_ids(corpus, layout)
    if layout == "packed":
        ids = ids[: LIMIT * T + 1]
        left_out = {meta.eos_id} if protocol.eos == "masked" else set()
        if protocol.layout == "stream":
            return [ids], left_out
        documents = [[]]
        for token in ids:
            documents[-1].append(token)
            if token == meta.eos_id:
                documents.append([])
        return [document for document in documents if document], left_out
    rows = [ids[16 * row : 16 * row + 16] for row in range(LIMIT)]
    if protocol.layout == "chunked":
        return rows, {meta.pad_id} if protocol.pad == "masked" else set()
    between = [meta.eos_id] if protocol.eos == "masked" else []
    stream = []
    for row in rows:
        stream += (between if stream else []) + [token for token in row if token != meta.pad_id]
    return [stream], set(between)


def raw_ids(corpus, layout):
    """The published lines, encoded and laid out without the product's code."""
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    encoded = [tokenizer.encode(published(number)).ids for number in range(500, 650)]
    if layout == "packed":
        return [token for ids in encoded for token in [*ids, 1]]
    rows = []
    for ids in encoded:
        cut = [ids[start : start + 16] for start in range(0, len(ids), 16)]
        rows += [(piece + [0] * 16)[:16] for piece in cut if len(piece) >= 6]
    return [token for row in rows for token in row]


@torch.no_grad()
def nats_of(model, pieces, left_out, context, stride):
    """Nats of the targets that count, one forward pass each over exactly what it may see."""
    nats = []
    for piece in pieces:
        last = len(piece) - 1
        for t in range(1, len(piece)):
            end = context if t <= context else context + stride * math.ceil((t - context) / stride)
            begin = max(0, min(end, last) - context)
            if piece[t] not in left_out:
                hidden = model(torch.tensor([piece[begin:t]])).hidden[0, -1:]
                nats.append(float(F.cross_entropy(model.logits(hidden), torch.tensor([piece[t]]))))
    return nats


def test_every_row_is_what_brute_force_gives(scored):
    layout, corpus, model, rows = scored
    for row in (row for row in rows if row.name == "nll"):
        protocol = row.protocol
        pieces, left_out = pieces_of(layout, corpus, protocol)
        nats = nats_of(model, pieces, left_out, protocol.context, protocol.stride)
        assert row.n == len(nats), protocol
        assert row.value == pytest.approx(np.mean(nats), rel=1e-5), protocol


def test_the_matrix_has_every_protocol_of_its_corpus(scored):
    layout, _, _, rows = scored
    kinds = {(r.protocol.layout, r.protocol.pad, r.protocol.eos, r.protocol.text) for r in rows}
    stream = {("stream", "none", eos, "prepared") for eos in ("as_prepared", "masked")}
    if layout == "padded":
        rules = ("masked", "pad_counted")
        own = {
            ("chunked", pad, "as_prepared", text) for pad in rules for text in ("prepared", "raw")
        }
    else:
        own = {
            (where, "none", eos, text)
            for where, text in (("documents", "prepared"), ("stream", "raw"))
            for eos in ("as_prepared", "masked")
        }
    assert kinds == own | stream
    windows = {
        (row.protocol.context, row.protocol.stride)
        for row in rows
        if (row.protocol.layout, row.protocol.eos) == ("stream", "as_prepared")
    }
    assert windows == {(15, 15), (15, 7), (15, 1), (7, 7), (3, 3), (30, 30)}
    protocols = [(row.name, row.protocol) for row in rows]
    assert len(protocols) == len(set(map(str, protocols))), "no protocol occurs twice"
    assert all((row.note == LONGER) == (row.protocol.context > T) for row in rows)


def by_protocol(rows):
    """Protocol -> its rows by name."""
    found = {}
    for row in rows:
        found.setdefault(row.protocol.model_dump_json(), {})[row.name] = row
    return list(found.values())


def test_units_of_one_protocol_are_one_number(scored):
    layout, corpus, _, rows = scored
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    for names in by_protocol(rows):
        nats = names["nll"].value * names["nll"].n
        assert math.log(names["ppl"].value) * names["ppl"].n == pytest.approx(nats)
        if names["nll"].protocol.pad == "pad_counted":
            assert names.keys() == {"nll", "ppl"}, "PAD is neither word nor byte"
            continue
        word, byte = names["ppl_word"], names["bits_per_byte"]
        assert math.log(word.value) * word.n == pytest.approx(nats)
        assert byte.value * math.log(2) * byte.n == pytest.approx(nats)
        pieces, _ = pieces_of(layout, corpus, names["nll"].protocol)
        text = "".join(tokenizer.decode(piece[1:], skip_special_tokens=True) for piece in pieces)
        # A row may be cut inside a character, which the decoder replaces by a longer one.
        assert byte.n == pytest.approx(len(text.encode()), abs=2 * LIMIT)
        assert word.n >= len(text.split())


def test_the_recorded_protocol_gives_the_record(scored):
    layout, corpus, model, rows = scored
    limit, padded = LIMIT, layout == "padded"
    name = rows[0].protocol.tokenizer
    recorded = {
        (metric.name, metric.protocol.pad): metric
        for metric in evaluate_split(model, corpus, "validation", T, limit, 4, CPU, name, padded)
        if metric.protocol
    }
    ours = [row for row in rows if row.note == RECORDED]
    assert len(ours) == len(recorded) == (6 if padded else 4)
    for row in ours:
        twin = recorded[row.name, row.protocol.pad]
        assert row.protocol == twin.protocol
        if row.unit != "ppl/word":  # words cut by a window count twice in the record
            assert (row.n, row.value) == (twin.n, pytest.approx(twin.value, rel=1e-6))
        if twin.stderr:
            assert row.stderr == pytest.approx(twin.stderr, rel=1e-5)


def test_more_context_and_another_layout_change_the_figure(scored):
    _, _, _, rows = scored
    values = [round(row.value, 9) for row in rows if row.name == "nll"]
    assert len(set(values)) > 0.8 * len(values)


def test_text_without_marks_has_no_raw_rows(scored, tmp_path):
    layout, _, model, rows = scored
    corpus = corpus_of(tmp_path, layout, plain)
    other, reason = matrix_of(model, corpus, T, "validation", LIMIT, CPU)
    assert reason == NO_RAW_TEXT
    assert {row.protocol.text for row in other} == {"prepared"}
    meta = load_meta(corpus)
    wheel = meta.spec.model_copy(update={"source": WheelSource()})
    with pytest.raises(UserError, match="the source has none"):
        raw_shard(meta.model_copy(update={"spec": wheel}), None, None, "validation", 1, T)
    (tmp_path / "validation.txt").unlink()
    _, reason = matrix_of(model, corpus, T, "validation", 1, CPU)
    assert "validation.txt" in reason, "text that is gone is named, the other rows stay"


@pytest.fixture(scope="module")
def trained(scored, tmp_path_factory):
    """Arguments of `mol eval` for a finished run, and its folder."""
    layout, corpus, model, _ = scored
    root = tmp_path_factory.mktemp("results")
    spec = TrainSpec(
        scale="smoke",
        condition="tiny",
        model=model.config,
        data=load_meta(corpus).spec,
        seq_len=T,
        optim=OptimSpec(steps=2, batch_size=2, lr=1e-3, warmup_steps=1),
        evaluation=EvalSpec(every=2, curve_sequences=2, final_sequences=LIMIT),
        seed=1,
    )
    folder = root / "runs" / "smoke" / spec.run_id
    execute(spec, corpus, folder, CPU)
    (root / "data" / "smoke").mkdir(parents=True)
    (root / "data" / "smoke" / spec.data.folder).symlink_to(corpus)
    (root / "spec.json").write_text(spec.model_dump_json())
    return ["eval", "--spec", str(root / "spec.json"), "--results", str(root)], folder


def test_command_prints_and_saves_the_matrix(trained, capsys):
    call, folder = trained
    assert main([*call, "--protocols", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert not (folder / "protocols.json").exists()
    assert main([*call, "--protocols", "--save"]) == 0
    assert "protocols.json" in capsys.readouterr().out.replace("\n", "")
    record = load_record(folder / "record.json")
    matrix = load_matrix(folder / "protocols.json", record)
    assert [row.model_dump(mode="json") for row in matrix.rows] == printed
    recorded = {str((m.name, m.protocol)): m for m in record.metrics if m.protocol}
    for row in (row for row in matrix.rows if row.note == RECORDED and row.name == "nll"):
        assert row.value == pytest.approx(recorded[str((row.name, row.protocol))].value, rel=1e-6)
    assert main([*call, "--protocols", "--split", "test", "--limit", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["protocol"]["split"] for row in rows} == {"test"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--save"], "--save goes with --protocols"),
        (["--protocols", "--stride", "3"], "leave --stride out"),
        (["--protocols", "--context", "3"], "--context goes with --stride"),
        (["--protocols", "--limit", "0"], "--limit 0"),
    ],
)
def test_bad_arguments_exit_with_2_and_one_line(trained, capsys, options, message):
    call, _ = trained
    assert main([*call, *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_an_unfinished_run_cannot_be_saved(trained, capsys):
    call, folder = trained
    record = folder / "record.json"
    record.rename(folder / "away")
    try:
        assert main([*call, "--protocols", "--save"]) == 2
    finally:
        (folder / "away").rename(record)
    assert "record.json: missing; --save needs a finished run" in capsys.readouterr().err
