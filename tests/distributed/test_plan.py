"""`mol plan --parallel` against what gloo ranks hold and send."""

import json
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from places import make_spec
from ranks import together
from tiny_corpus import LAYER

from mol.cli import main
from mol.data.loader import TokenBatches
from mol.model.block_parallel import (
    ExchangedStage,
    combine_gradients,
    expected_exchange,
    placed,
)
from mol.model.transformer import LanguageModel
from mol.ops.collectives import Traffic, of_all_ranks, rank, world
from mol.plan import parallel
from mol.plan.parallel import activation_bytes, share
from mol.train import distributed
from mol.train.step import TrainStep


def size(tensors) -> int:
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    return sum(t.numel() * t.element_size() for t in local if t is not None)


def trained_as_planned(spec, corpus, way: str) -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    distributed.SHARD_FROM = 1 if way == "fsdp2" else 10**9
    torch.manual_seed(0)
    model = LanguageModel(spec.model)
    step = TrainStep(model, spec.optim, spec.seq_len, torch.device("cpu"), False)
    micro = spec.optim.batch_size // spec.optim.accumulate
    batches = TokenBatches(corpus, "train", spec.seq_len, micro, 0, share=(rank(), world()))
    first, second = ([batches.next() for _ in range(spec.optim.accumulate)] for _ in "ab")
    step(first, 1e-3)  # DDP orders its buckets anew after the first
    with Traffic() as traffic:
        step(second, 1e-3)
    planned = share(spec, way, world())
    optimizer = step.optimizer.state_dict()
    weights = list(step.optimizer.weights.values())
    held = size(weights), size(p.grad for p in weights)
    moments = sum(size(tensors.values()) for tensors in optimizer.values())
    if rank() == 0:  # the fullest
        assert (*held, moments) == (planned.weights, planned.gradients, planned.moments)
    small = spec.optim.accumulate * len(model.layers) * 6  # balance: a number a block, their count
    numbers = 2 * 4 * (small // 6 * (3 + 1)) + 4096  # loss and norm besides
    assert planned.sent <= sum(traffic.sent.values()) <= planned.sent + numbers
    if way == "fsdp2":
        sent = traffic.sent["all_gather"] + traffic.sent["reduce_scatter"]
        assert sent == planned.sent
    dist.destroy_process_group()
    return 0


@pytest.mark.parametrize(("way", "ranks"), [("ddp", 2), ("fsdp2", 3)])
def test_memory_and_traffic_are_those_planned(text, tmp_path, way, ranks):
    spec = make_spec(text.data, accumulate=2, checkpoint_activations=way == "fsdp2")
    for done in together(tmp_path, ranks, trained_as_planned, spec, text.corpus, way):
        assert done.code == 0, done.err


def placed_as_planned(spec) -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    torch.manual_seed(0)
    model = placed(LanguageModel(spec.model), ExchangedStage)
    model.checkpoint_activations = spec.optim.checkpoint_activations
    ids_BT = torch.randint(300, (spec.optim.batch_size // world(), spec.seq_len))
    with Traffic() as traffic:
        output = model(ids_BT)
        output.hidden.sum().backward()
        combine_gradients(model)
    rows = iter(rows_sent(output.routes, model.layers[0].held))
    parallel.expected_exchange = lambda *args: expected_exchange(*args)._replace(**next(rows))
    planned = share(spec, "blocks", world())
    if rank() == 0:  # the fullest
        weights = list(model.parameters())
        assert (size(weights), size(p.grad for p in weights)) == planned[1:3]
        # Each stage's balance loss: a sum over ranks of its blocks' probabilities and a count.
        forwards = 1 + spec.optim.checkpoint_activations
        numbers = forwards * len(model.layers) * (LAYER.n_routed + 1)
        assert sum(traffic.sent.values()) == planned.sent + 2 * 4 * numbers // 2
    dist.destroy_process_group()
    return 0


def rows_sent(routes, held):
    """Each stage's rows from this rank to others and from them to this one."""
    every = of_all_ranks(routes)
    first = sum(held[: rank()])
    for stage in range(len(routes)):
        here = [int(((r[stage] >= first) & (r[stage] < first + held[rank()])).sum()) for r in every]
        mine = here.pop(rank())
        yield {"out": routes[stage].numel() - mine, "back": sum(here)}


@pytest.mark.parametrize("again", [False, True])
def test_placed_blocks_hold_and_send_what_is_planned(text, tmp_path, again):
    """With the rows of this routing in the place of those expected, the plan is exact."""
    spec = make_spec(text.data, checkpoint_activations=again)
    for done in together(tmp_path, 2, placed_as_planned, spec):
        assert done.code == 0, done.err


def test_activations_grow_with_tokens_and_shrink_when_computed_again(text):
    plain = make_spec(text.data)
    again = make_spec(text.data, checkpoint_activations=True)
    assert activation_bytes(plain, 2) > activation_bytes(again, 2) > 0
    assert activation_bytes(plain, 1) == pytest.approx(2 * activation_bytes(plain, 2), rel=1e-9)


def test_e11_on_four_gpus_is_one_command(capsys):
    argv = ["plan", "--scale", "paper", "--run", "mol-2p08b", "--parallel", "4", "--json"]
    assert main(argv) == 0
    ways = {row["way"]: row for row in json.loads(capsys.readouterr().out)}
    assert ways.keys() == {"ddp", "fsdp2", "blocks"}
    # Rows are shared, and a stack of 14 routed blocks has 14: the fullest rank holds 4 of them.
    assert 4 / 14 < ways["fsdp2"]["weights"] / ways["ddp"]["weights"] < 0.35
    assert ways["ddp"]["weights"] == pytest.approx(4 * 2.08e9, rel=0.01)
    for row in ways.values():
        assert row["step_s_overlapped"] >= max(row["compute_s"], row["traffic_s"])
    faster = [*argv, "--bandwidth", "900", "--tflops", "800"]
    assert main(faster) == 0
    for row in json.loads(capsys.readouterr().out):
        assert row["step_s_in_turn"] == pytest.approx(ways[row["way"]]["step_s_in_turn"] / 2)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--parallel", "1", "--run", "mol-2p08b"], "--parallel 1"),
        (["--parallel", "4"], "--run NAME"),
        (["--run", "mol-2p08b"], "add --parallel N"),
        (["--parallel", "4", "--run", "mol-2p08b", "--tflops", "nan"], "--tflops nan"),
    ],
)
def test_wrong_figures_are_refused(capsys, more, named):
    assert main(["plan", "--scale", "paper", *more]) == 2
    assert named in capsys.readouterr().err
