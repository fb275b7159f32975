"""Appendix F on gloo ranks: outputs, gradients, parameters and traffic against one process."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import together

from mol.bench.sharding import parameters_per_device
from mol.model.block_parallel import (
    ExchangedStage,
    SummedStage,
    combine_gradients,
    expected_exchange,
    placed,
    placement,
)
from mol.model.config import ModelConfig, SplitLayer
from mol.model.transformer import LanguageModel
from mol.ops.collectives import Traffic, rank, world

BATCH, LENGTH, WIDTH = 5, 24, 16


def config(attention: str) -> ModelConfig:
    layer = SplitLayer(
        d_thin=8, n_heads=2, n_blocks=6, n_shared=1, top_k=2, attention=attention, d_ff=16
    )
    return ModelConfig(vocab_size=40, d_model=WIDTH, n_layers=2, layer=layer, init_std=0.3)


def build(attention: str) -> LanguageModel:
    torch.manual_seed(3)
    return LanguageModel(config(attention))


def outputs(model, ids_BT, of: int):
    """Backward pass of a loss that is a mean over `of` sequences, with the balance loss."""
    output = model(ids_BT)
    (output.hidden.square().sum() / of + 3 * output.balance).backward()
    return output


def sequences() -> torch.Tensor:
    return torch.randint(40, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def same_as_one_process(scheme: type, attention: str) -> int:
    ids_BT = sequences()
    one = build(attention)
    reference = outputs(one, ids_BT, BATCH)
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    model = placed(build(attention), scheme)
    exchanged = scheme is ExchangedStage
    mine = slice(rank() * BATCH // world(), (rank() + 1) * BATCH // world())
    mine = mine if exchanged else slice(None)
    with Traffic() as traffic:
        output = outputs(model, ids_BT[mine], BATCH / world() if exchanged else BATCH)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(output.hidden, reference.hidden[mine], **close)
    torch.testing.assert_close(output.balance, reference.balance, **close)
    if exchanged:
        combine_gradients(model)
    check_gradients(model, one, close)
    held, _ = parameters_per_device(config(attention), world())
    assert sum(p.numel() for p in model.parameters()) == held[rank()]
    if exchanged:
        check_exchanged_bytes(traffic, reference.routes, mine)
    else:
        ring = 2 * (world() - 1)
        sums = WIDTH + (WIDTH + 2)  # outputs forward; gradients of tokens and of k = 2 weights
        stages = len(model.layers)
        assert traffic.calls == {"all_reduce": 2 * stages}
        assert traffic.sent["all_reduce"] == stages * (ring * BATCH * LENGTH * sums * 4 // world())
    dist.destroy_process_group()
    return 0


def check_gradients(model, one, close) -> None:
    expected = dict(one.named_parameters())
    compared = 0
    for name, weight in model.named_parameters():
        whole = expected[name].grad
        if ".routed." in name:
            stage = model.layers[int(name.split(".")[1])]
            whole = whole[stage.first : stage.first + stage.held[rank()]]
        torch.testing.assert_close(weight.grad, whole, **close, msg=lambda text, n=name: n + text)
        compared += 1
    assert compared == len(expected)


def check_exchanged_bytes(traffic, routes, mine) -> None:
    """What is sent is what `Exchange` counts of the rows that this routing sends."""
    owner_E = torch.tensor([d for d, n in enumerate(placement(5, world())) for _ in range(n)])
    home_B = torch.zeros(BATCH, dtype=torch.long)
    for r in range(world()):
        home_B[r * BATCH // world() : (r + 1) * BATCH // world()] = r
    layer, held, expected = config("softmax").layer, placement(5, world())[rank()], 0
    for route_BTk in routes:
        to_BTk, from_BTk = owner_E[route_BTk], home_B[:, None, None]
        out = int(((from_BTk == rank()) & (to_BTk != rank())).sum())
        back = int(((from_BTk != rank()) & (to_BTk == rank())).sum())
        planned = expected_exchange(layer, world(), held, 0, mine.stop - mine.start)
        exchange = planned._replace(out=out, back=back)
        expected += exchange.forward(4 * WIDTH) + exchange.backward(4 * WIDTH)
    assert traffic.calls["all_to_all"] == 6 * len(routes)
    assert traffic.sent["all_to_all"] + traffic.sent["all_gather"] == expected


@pytest.mark.parametrize("scheme", [ExchangedStage, SummedStage])
@pytest.mark.parametrize(("ranks", "attention"), [(2, "softmax"), (3, "deltanet")])
def test_ranks_equal_one_process(tmp_path, scheme, ranks, attention):
    for done in together(tmp_path, ranks, same_as_one_process, scheme, attention):
        assert done.code == 0, done.err


def test_placement_is_even_and_complete():
    assert placement(14, 3) == [5, 5, 4]
    assert placement(2, 3) == [1, 1, 0]


def test_what_cannot_be_placed_is_refused():
    layer = config("softmax").layer.model_copy(update={"coverage": "full"})
    model = LanguageModel(config("softmax").model_copy(update={"layer": layer}))
    with pytest.raises(ValueError, match="nothing to route"):
        placed(model, ExchangedStage)
