"""What the GPU programs share, as far as a CPU can show it."""

import json
import os

import torch

from mol.bench import common
from mol.bench.common import (
    attention_backend,
    layers_compiled,
    mode_of,
    without_tuning_by_length,
)
from mol.model.config import DenseLayer, ModelConfig
from mol.model.transformer import LanguageModel

CPU = torch.device("cpu")


def test_layers_run_as_they_are_on_a_cpu():
    layer = DenseLayer(n_heads=2, d_ff=16)
    model = LanguageModel(ModelConfig(vocab_size=9, d_model=8, n_layers=2, layer=layer))
    with layers_compiled(model, CPU):
        assert not any({"forward", "step"} & vars(layer).keys() for layer in model.layers)


def test_the_back_end_has_torch_s_own_name():
    name = attention_backend(heads=2, width=8, length=16, device=CPU, dtype="fp32")
    assert name in ("math", "flash", "efficient", "cudnn")


def test_each_way_to_run_has_a_mode_of_its_own():
    ways = [(c, g) for c in (False, True) for g in (False, True)]
    modes = [mode_of(compiled=c, graphed=g) for c, g in ways]
    assert modes == ["eager", "graph", "compiled", "compiled_graph"]


def test_the_l2_norm_is_given_one_launch_shape(monkeypatch):
    for name in ("FLA_CACHE_MODE", "FLA_CONFIG_DIR"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    without_tuning_by_length()
    assert os.environ["FLA_CACHE_MODE"] == "default"
    files = sorted(common.Path(os.environ["FLA_CONFIG_DIR"]).iterdir())
    assert [f.name for f in files] == ["l2norm_bwd_kernel.json", "l2norm_fwd_kernel.json"]
    for file in files:
        chosen = json.loads(file.read_text())["default_config"]
        assert chosen.keys() == {"kwargs", "num_warps", "num_stages", "num_ctas"}
    monkeypatch.setenv("FLA_CACHE_MODE", "strict")
    without_tuning_by_length()
    assert os.environ["FLA_CACHE_MODE"] == "strict"  # a choice of the user's own stands
