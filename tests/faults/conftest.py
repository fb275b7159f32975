"""A tiny model on a tiny text, and what an uncut run of it leaves."""

from types import SimpleNamespace

import pytest
from processes import call
from tiny import LAYER, STEPS, Place
from victims import command

from mol.data.config import DataSpec, FileSource, PaddedLayout
from mol.data.packing import prepare
from mol.model.config import ModelConfig
from mol.plan.spec import EvalSpec, OptimSpec, TrainSpec


@pytest.fixture(scope="session")
def uncut(tmp_path_factory):
    """Specification, corpus and curve of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("uncut")
    words = [f"w{i * i % 97} x{i % 13} y{i % 7}" for i in range(6000)]
    paragraphs = [" ".join(words[i : i + 3 + i % 11]) for i in range(0, 6000, 15)]
    (folder / "text.txt").write_text("\n\n".join(paragraphs))
    data = DataSpec(
        corpus="wikitext103",
        source=FileSource(train=str(folder / "text.txt")),
        tokenizer="bpe",
        vocab_size=300,
        layout=PaddedLayout(chunk=16, min_chunk=8),
    )
    prepare(data, folder / "corpus")
    spec = TrainSpec(
        scale="smoke",
        condition="tiny",
        model=ModelConfig(vocab_size=300, d_model=32, n_layers=2, layer=LAYER),
        data=data,
        seq_len=15,
        optim=OptimSpec(steps=STEPS, batch_size=4, lr=3e-3, warmup_steps=2),
        evaluation=EvalSpec(every=5, curve_sequences=4, final_sequences=8),
        seed=7,
    )
    found = SimpleNamespace(spec=spec, corpus=folder / "corpus")
    place = Place(folder / "results", found)
    done = call(folder, command, place.train())
    assert done.code == 0, done.err
    found.curve, found.run = place.curve(), place.run
    return found


@pytest.fixture
def place(tmp_path, uncut):
    return Place(tmp_path / "results", uncut)
