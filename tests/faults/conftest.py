"""A tiny model on a tiny text, and what an uncut run of it leaves."""

from types import SimpleNamespace

import pytest
from processes import call
from tiny import STEPS, Place
from tiny_corpus import LAYER, tiny_corpus
from victims import command

from mol.model.config import ModelConfig
from mol.plan.spec import EvalSpec, OptimSpec, TrainSpec


@pytest.fixture(scope="session")
def uncut(tmp_path_factory):
    """Specification, corpus and curve of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("uncut")
    data = tiny_corpus(folder)
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
