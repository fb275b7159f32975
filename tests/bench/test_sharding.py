from itertools import combinations

import pytest
import torch

from mol.bench import sharding
from mol.bench.config import ShardingBench
from mol.model.block_parallel import expected_exchange
from mol.model.config import DenseLayer, ModelConfig, SplitLayer
from mol.plan.experiments import load_experiments


def config(**changes) -> ModelConfig:
    layer = {"d_thin": 8, "n_heads": 2, "n_blocks": 6, "n_shared": 1, "top_k": 2, "d_ff": 16}
    return ModelConfig(vocab_size=50, d_model=16, n_layers=3, layer=SplitLayer(**layer | changes))


def test_placement_is_even_and_complete():
    assert sharding.placement(14, 3) == [5, 5, 4]
    assert sharding.placement(2, 3) == [1, 1, 0]
    assert sharding.placement(6, 2) == [3, 3]


def test_parameters_by_hand():
    # A softmax block of width 8 in a model of width 16: W_down and W_up, q k v o with biases,
    # two norms, two FFN matrices.
    block = 2 * 16 * 8 + 4 * 8 * 8 + 4 * 8 + 2 * 8 + 2 * 8 * 16
    everywhere = 50 * 16 + 16 + 3 * (5 * 16 + block)  # embedding, last norm; router, shared block
    held, total = sharding.parameters_per_device(config(), devices=2)
    assert total == everywhere + 3 * 5 * block
    assert held == [everywhere + 3 * 3 * block, everywhere + 3 * 2 * block]


def test_the_paper_s_198m_model_on_three_devices():
    model = load_experiments().model("deltanet-1p3of15")
    # A Gated DeltaNet block at d = 256, H = 4, f = 1024, D = 1024.
    delta = 5 * 256**2 + 2 * 256 * 4 + 12 * 256 + 64 + 2 * 4
    block = 2 * 1024 * 256 + delta + 2 * 256 + 2 * 256 * 1024
    held, total = sharding.parameters_per_device(model, devices=3)
    assert max(held) == total - 8 * 9 * block
    outcome = sharding.run(ShardingBench(model=model, devices=3), torch.device("cpu"), 0)
    (reduction,) = (m for m in outcome.metrics if m.name == "params_reduction")
    assert reduction.value == pytest.approx(8 * 9 * block / total)
    assert reduction.labels == {"method": "analytic"}
    per_device = [m.value for m in outcome.metrics if m.name == "params_per_device"]
    assert per_device == held
    assert all(m.labels["method"] == "analytic" for m in outcome.metrics)


@pytest.mark.parametrize(("top_k", "devices"), [(1, 2), (2, 2), (3, 3), (5, 4)])
def test_rows_by_listing_every_choice(top_k, devices):
    """A token of each device, every set of blocks: rows to other devices, and from them."""
    layer, held = config(top_k=top_k).layer, sharding.placement(5, devices)
    owner = [d for d, n in enumerate(held) for _ in range(n)]
    choices = list(combinations(range(5), top_k))
    for device in range(devices):
        found = expected_exchange(layer, devices, held[device], 1, 1)
        out = sum(owner[block] != device for chosen in choices for block in chosen)
        back = sum(owner[block] == device for chosen in choices for block in chosen) * (devices - 1)
        assert found.out == pytest.approx(out / len(choices))
        assert found.back == pytest.approx(back / len(choices))


def test_bytes_by_scheme():
    found = sharding.bytes_per_token(config(top_k=2), devices=2)
    # Two rows, each remote half of the time: 16 bf16 numbers there and back and its position, in
    # three stages.
    assert found["all_to_all"] == pytest.approx(3 * 2 * 0.5 * (2 * 16 * 2 + 4))
    assert found["all_reduce"] == 3 * 2 * 16 * 2
    assert found["tensor_parallel"] == 2 * found["all_reduce"]


def test_only_split_layers_are_placed():
    dense = ModelConfig(vocab_size=50, d_model=16, n_layers=2, layer=DenseLayer(n_heads=2, d_ff=16))
    held, total = sharding.parameters_per_device(dense, devices=3)
    assert held == [total] * 3
    assert sharding.bytes_per_token(dense, 3)["all_to_all"] == 0


def test_ranks_are_measured_and_named_for_what_they_are():
    model = config(d_thin=16, d_ff=32).model_copy(update={"d_model": 32})
    bench = ShardingBench(model=model, devices=2, ranks=(2,), seq_len=8)
    outcome = sharding.run(bench, torch.device("cpu"), 0)
    found = {}
    for metric in outcome.metrics:
        if metric.labels["method"] == "measured":
            assert (metric.labels["device"], metric.labels["backend"]) == ("cpu", "gloo")
            found[metric.name, metric.labels["way"], metric.labels["ranks"]] = metric.value
    ways = (("one", 1), ("ddp", 2), ("all_to_all", 2), ("all_reduce", 2))
    assert found.keys() == {(n, *way) for n in ("rank_memory", "rank_step_ms") for way in ways}
    memory = {way: found["rank_memory", way, ranks] for way, ranks in ways}
    measured = config().model_copy(update={"vocab_size": 64, "n_layers": 1})  # half the widths
    held, total = sharding.parameters_per_device(measured, devices=2)
    kept = memory["one"] - 2 * 4 * total  # weights and gradients in fp32
    assert kept > 0
    # Half the sequences keep half the tensors, but for the few that do not grow with them.
    assert memory["ddp"] - 2 * 4 * total == pytest.approx(kept / 2, rel=0.05)
    assert 2 * 4 * max(held) < memory["all_to_all"] < memory["ddp"]
    assert any("no GPU's figures" in note for note in outcome.notes)


@pytest.mark.parametrize("layer", [{"n_blocks": 3}, {"coverage": "full"}, {"top_k": 5}])
def test_ranks_without_routed_blocks_of_their_own_are_refused(layer):
    with pytest.raises(ValueError, match="not so many routed blocks"):
        ShardingBench(model=config(**layer), ranks=(3,))
