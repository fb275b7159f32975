"""A tiny run and the folder that it trains in, for any number of ranks."""

from tiny_corpus import LAYER

from mol.model.config import ModelConfig
from mol.plan.select import corpus_folder, run_folder
from mol.plan.spec import EvalSpec, OptimSpec, TrainSpec


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
