"""A tiny corpus and a tiny model of it, trained by one process."""

from types import SimpleNamespace

import pytest
from processes import call
from ranks import train
from tiny_corpus import LAYER, tiny_corpus

from mol.model.config import ModelConfig
from mol.plan.select import corpus_folder, run_folder
from mol.plan.spec import EvalSpec, OptimSpec, TrainSpec


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    data = tiny_corpus(folder)
    return SimpleNamespace(data=data, corpus=folder / "corpus")


def make_spec(data, layer=LAYER, **optim) -> TrainSpec:
    settings = {"steps": 8, "batch_size": 12, "lr": 3e-3, "warmup_steps": 2, "clip": 0.5} | optim
    return TrainSpec(
        scale="smoke",
        condition="tiny",
        model=ModelConfig(vocab_size=300, d_model=32, n_layers=2, layer=layer, init_std=0.15),
        data=data,
        seq_len=15,
        optim=OptimSpec(**settings),
        evaluation=EvalSpec(every=4, curve_sequences=4, final_sequences=8),
        seed=7,
    )


class Place:
    """A results folder for one run."""

    def __init__(self, folder, text, spec):
        self.results, self.spec = folder, spec
        self.run = run_folder(folder, spec)
        corpus = corpus_folder(folder, "smoke", spec.data.folder)
        corpus.parent.mkdir(parents=True)
        corpus.symlink_to(text.corpus)
        self.spec_file = folder / "spec.json"
        self.spec_file.write_text(spec.model_dump_json())

    def argv(self, *more):
        options = ["--spec", str(self.spec_file), "--results", str(self.results), "--quiet"]
        return ["train", *options, "--device", "cpu", "--threads", "1", *more]


@pytest.fixture(scope="session")
def alone(text, tmp_path_factory):
    """Curve, weights and record of a specification that one process trained."""
    found = {}

    def trained(spec):
        if spec.run_id not in found:
            place = Place(tmp_path_factory.mktemp("alone"), text, spec)
            done = call(place.results, train, place.argv(), 10**9)
            assert done.code == 0, done.err
            found[spec.run_id] = place
        return found[spec.run_id]

    return trained
