"""A results folder with a prepared corpus, to which tests add finished runs."""

import random
from types import SimpleNamespace

import pytest
from small_runs import VOCAB, finished_run

from mol.data.config import DataSpec, FileSource, PackedLayout
from mol.data.meta import load_meta
from mol.data.packing import prepare
from mol.model.config import ModelConfig

WORDS = "river stone mountain walked over under quick brown fox jumps the a and near".split()


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """A results folder with one prepared corpus; `.run(model)` adds a finished run of a model."""
    folder = tmp_path_factory.mktemp("results")
    rng = random.Random(1)
    paths = {split: folder / f"{split}.txt" for split in ("train", "validation", "test")}
    for path in paths.values():
        lines = [" ".join(rng.choices(WORDS, k=12)) + "." for _ in range(150)]
        path.write_text("\n".join(lines), "utf-8")
    data = DataSpec(
        corpus="fineweb_edu",
        source=FileSource(**{split: str(path) for split, path in paths.items()}),
        tokenizer="bpe",
        vocab_size=VOCAB,
        layout=PackedLayout(),
    )
    corpus = folder / "data" / "smoke" / data.folder
    prepare(data, corpus)

    def run(model: ModelConfig, condition: str = "tiny"):
        return finished_run(folder, data, load_meta(corpus), model, condition)

    return SimpleNamespace(folder=folder, corpus=corpus, meta=load_meta(corpus), run=run)
