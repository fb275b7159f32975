"""Perplexity against brute force, its units against each other, gaps, strided windows."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mol.base import UserError
from mol.data.config import DataSpec, FileSource, PackedLayout, PaddedLayout
from mol.data.loader import eval_sequences
from mol.data.packing import prepare
from mol.evaluate.perplexity import Tally, evaluate_split, inter_token_gaps, mean_and_error, score
from mol.evaluate.windows import real_stream, stream_windows
from mol.model.config import DenseLayer, ModelConfig
from mol.model.transformer import LanguageModel

CPU = torch.device("cpu")
LAYOUTS = {"padded": PaddedLayout(chunk=16, min_chunk=6), "packed": PackedLayout()}


@pytest.fixture(scope="module", params=["padded", "packed"])
def corpus(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    paragraphs = [" ".join(f"naïve{i * j % 53} λ{j}" for j in range(3 + i % 9)) for i in range(600)]
    (folder / "text.txt").write_text("\n\n".join(paragraphs), encoding="utf-8")
    data = DataSpec(
        corpus="wikitext103",
        source=FileSource(train=str(folder / "text.txt")),
        tokenizer="bpe",
        vocab_size=300,
        layout=LAYOUTS[request.param],
    )
    prepare(data, folder / "corpus")
    torch.manual_seed(0)
    layer = DenseLayer(n_heads=2, d_ff=16)
    model = LanguageModel(ModelConfig(vocab_size=300, d_model=16, n_layers=2, layer=layer))
    return request.param, folder / "corpus", model


def brute_force(model, sequences):
    """Nats of every real target, one sequence and one position at a time."""
    nats = []
    with torch.no_grad():
        for inputs, targets, real in sequences:
            logits = model.logits(model(inputs[None]).hidden[0])
            for t in range(len(targets)):
                if real[t]:
                    nats.append(float(F.cross_entropy(logits[t], targets[t])))
    return nats


def metrics_of(folder, model, layout, limit=None, batch_size=3):
    found = evaluate_split(
        model, folder, "validation", 15, limit, batch_size, CPU, "bpe:test", layout == "padded"
    )
    return {(m.name, m.protocol.pad): m for m in found}


def test_every_token_is_scored_once_as_brute_force_scores_it(corpus):
    layout, folder, model = corpus
    nats = brute_force(model, eval_sequences(folder, "validation", 15, None))
    pad = "masked" if layout == "padded" else "none"
    found = metrics_of(folder, model, layout)
    assert found["nll", pad].n == len(nats)
    assert found["nll", pad].value == pytest.approx(np.mean(nats), rel=1e-6)
    assert found["ppl", pad].value == pytest.approx(math.exp(np.mean(nats)), rel=1e-6)
    stream = real_stream(folder, "validation")
    rows = len(list(eval_sequences(folder, "validation", 15, None)))
    not_scored = rows if layout == "padded" else 1  # the first token of each row, of the stream
    assert len(nats) == len(stream) - not_scored


def test_units_agree_through_their_counts(corpus):
    layout, folder, model = corpus
    pad = "masked" if layout == "padded" else "none"
    found = metrics_of(folder, model, layout)
    nats = found["nll", pad].value * found["nll", pad].n
    word, byte = found["ppl_word", pad], found["bits_per_byte", pad]
    assert math.log(word.value) * word.n == pytest.approx(nats)
    assert byte.value * math.log(2) * byte.n == pytest.approx(nats)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    scored = [t[r].tolist() for _, t, r in eval_sequences(folder, "validation", 15, None)]
    pieces = [i for ids in scored for i in ids]
    text = tokenizer.decode(pieces, skip_special_tokens=True)
    assert byte.n == pytest.approx(len(text.encode()), abs=2 * len(scored))
    assert word.n >= len(text.split()) * 0.9


def test_pad_counted_is_another_figure_and_only_where_there_is_pad(corpus):
    layout, folder, model = corpus
    found = metrics_of(folder, model, layout)
    assert (("ppl", "pad_counted") in found) == (layout == "padded")
    if layout == "padded":
        assert found["ppl", "pad_counted"].n > found["ppl", "masked"].n
        assert found["ppl", "pad_counted"].value != found["ppl", "masked"].value


def test_batch_size_does_not_matter(corpus):
    layout, folder, model = corpus
    one, many = (metrics_of(folder, model, layout, 20, size) for size in (1, 7))
    for key, metric in one.items():
        assert many[key].value == pytest.approx(metric.value, rel=1e-6), key
        assert many[key].n == metric.n


def test_standard_error_is_that_of_a_ratio():
    tally = Tally(per_sequence=[(10.0, 4), (9.0, 3), (30.0, 9)], sequences=3)
    tally.nll_real, tally.n_real = 49.0, 16
    mean, error = mean_and_error(tally)
    residual = [10 - mean * 4, 9 - mean * 3, 30 - mean * 9]
    assert mean == 49 / 16
    assert error == pytest.approx(math.sqrt(np.var(residual, ddof=1) * 3) / 16)


def test_gaps_between_the_tokens_of_a_block():
    # Block 0 takes tokens 0, 2, 5; block 1 takes 1, 3, 4; block 2 none; the last token is PAD.
    routes = torch.tensor([[[0], [1], [0], [1], [1], [0], [0]]])
    real = torch.tensor([[True] * 6 + [False]])
    tally = Tally()
    tally.add_gaps([inter_token_gaps(routes, real, 3)])
    assert tally.gap_sum / tally.gap_pairs == pytest.approx((5 + 3) / (2 + 2))
    assert tally.block_gap_sum / tally.block_gaps == pytest.approx((5 / 2 + 3 / 2) / 2)
    assert tally.covered == pytest.approx(1 / 3)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 90), st.data())
def test_windows_score_every_target_once(n, data):
    context = data.draw(st.integers(1, n - 1))
    stride = data.draw(st.integers(1, context))
    stream = np.arange(n, dtype=np.int64)
    scored = []
    for index, (inputs, targets, real) in enumerate(stream_windows(stream, context, stride)):
        assert len(inputs) == context and torch.equal(inputs + 1, targets)
        if index:
            assert int(real.sum()) <= stride
            assert int((~real).sum()) >= context - stride
        scored += targets[real].tolist()
    assert scored == list(range(1, n))


def test_bad_windows_are_refused():
    stream = np.arange(10)
    for context, stride in ((4, 0), (4, 5)):
        with pytest.raises(UserError, match="--stride"):
            list(stream_windows(stream, context, stride))
    with pytest.raises(UserError, match="--context 10: the text has only 9"):
        list(stream_windows(stream, 10, 5))


def test_more_context_is_scored_by_the_same_model_differently(corpus):
    _, folder, model = corpus
    stream = real_stream(folder, "validation")[:200]
    chunked, _ = score(model, stream_windows(stream, 15, 15), 4, CPU)
    strided, _ = score(model, stream_windows(stream, 15, 1), 4, CPU)
    assert chunked.n_real == strided.n_real == 199
    assert chunked.nll_real != strided.nll_real


def test_eval_command_scores_a_trained_run(corpus, tmp_path, capsys):
    from mol.cli import main
    from mol.data.meta import load_meta
    from mol.plan.spec import EvalSpec, OptimSpec, TrainSpec
    from mol.train.run import execute

    layout, folder, model = corpus
    meta = load_meta(folder)
    spec = TrainSpec(
        scale="smoke",
        condition="tiny",
        model=model.config,
        data=meta.spec,
        seq_len=15,
        optim=OptimSpec(steps=2, batch_size=2, lr=1e-3, warmup_steps=1),
        evaluation=EvalSpec(every=2, curve_sequences=2),
        seed=1,
    )
    runs = tmp_path / "runs" / "smoke" / spec.run_id
    record = execute(spec, folder, runs, CPU)
    (tmp_path / "data" / "smoke").mkdir(parents=True)
    (tmp_path / "data" / "smoke" / spec.data.folder).symlink_to(folder)
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    call = ["eval", "--spec", str(tmp_path / "spec.json"), "--results", str(tmp_path), "--json"]
    assert main(call) == 0
    rows = json.loads(capsys.readouterr().out)
    recorded = [m.model_dump(mode="json") for m in record.metrics]
    for row in rows:
        twin = [
            m for m in recorded if m["name"] == row["name"] and m["protocol"] == row["protocol"]
        ]
        assert twin and row["value"] == pytest.approx(twin[0]["value"], rel=1e-6)
    assert main([*call, "--stride", "5", "--split", "test"]) == 0
    (nll, *_) = json.loads(capsys.readouterr().out)
    assert nll["protocol"] == {
        "tokenizer": f"bpe:{meta.tokenizer_sha256[:12]}", "pad": "none", "layout": "stream",
        "context": 15, "stride": 5, "split": "test", "eos": "as_prepared", "text": "prepared",
    }  # fmt: skip
    assert nll["n"] == len(real_stream(folder, "test")) - 1
    assert main([*call, "--stride", "99"]) == 2
    assert "--stride 99" in capsys.readouterr().err
