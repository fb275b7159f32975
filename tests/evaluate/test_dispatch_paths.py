"""One model by three ways: the same perplexity, and a way that computes another one shows."""

import math

import pytest
import torch
from tiny_corpus import LAYER, tiny_corpus

from mol.evaluate import dispatch_paths
from mol.evaluate.dispatch_paths import computed_in_several_ways, path_metrics
from mol.model.config import DenseLayer, ModelConfig
from mol.model.transformer import LanguageModel

CPU = torch.device("cpu")


def config(layer=LAYER, **changes):
    layer = layer.model_copy(update=changes)
    return ModelConfig(vocab_size=300, d_model=24, n_layers=2, layer=layer)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paths")
    tiny_corpus(folder)
    return folder / "corpus"


def figures(corpus, bf16=False, **changes):
    torch.manual_seed(0)
    model = LanguageModel(config(**changes))
    found = path_metrics(model, corpus, 15, 12, CPU, bf16)
    return {(m.name, m.labels["path"]): m for m in found}


@pytest.mark.parametrize("attention", ["deltanet", "softmax"])
def test_all_ways_agree(corpus, attention):
    found = figures(corpus, attention=attention)
    assert {path for name, path in found if name == "path_ppl"} == {"loop", "batched", "one_pass"}
    for path in ("batched", "one_pass"):
        change = found["path_ppl_change", path]
        assert abs(change.value) < 1e-5 and change.labels["over"] == "loop"
        ratio = found["path_ppl", path].value / found["path_ppl", "loop"].value
        assert math.isclose(change.value, ratio - 1, abs_tol=1e-11)
    assert found["path_ppl", "loop"].n > 12


def test_in_bf16_rounding_alone_differs(corpus):
    found = figures(corpus, bf16=True)
    assert all(abs(m.value) < 0.01 for (name, _), m in found.items() if name == "path_ppl_change")


def test_a_way_that_computes_something_else_shows(corpus, monkeypatch):
    def without_blocks(stage):
        chosen = torch.arange(LAYER.top_k)
        return lambda x, rope, cache=None, start=0: (
            x, x.new_zeros(()), chosen.expand(*x.shape[:2], -1)
        )  # fmt: skip

    monkeypatch.setitem(dispatch_paths.OTHERS, "batched", without_blocks)
    change = figures(corpus)["path_ppl_change", "batched"]
    assert abs(change.value) > 1e-5 and change.stderr > 0


def test_who_has_several_ways():
    assert computed_in_several_ways(config())
    assert not computed_in_several_ways(config(top_k=LAYER.n_routed))
    assert not computed_in_several_ways(config(coverage="full"))
    assert not computed_in_several_ways(config(DenseLayer(n_heads=2, d_ff=16)))
