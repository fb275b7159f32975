"""Ranks share the sequences that are scored: every figure is that of one process."""

from dataclasses import asdict
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from places import make_spec
from ranks import together

from mol.data.loader import eval_sequences
from mol.evaluate.perplexity import evaluate_split, score
from mol.model.transformer import LanguageModel
from mol.ops.collectives import rank, world
from mol.train import distributed

CPU = torch.device("cpu")
# Sums of some hundred values in another order, each from a batch of another size.
CLOSE = {"rel": 1e-6, "abs": 1e-9}


def scored(model, spec, corpus):
    """With 11 sequences, two at a time: of three ranks one has none left at the end."""
    found = score(model, eval_sequences(corpus, "test", spec.seq_len, 11), 2, CPU)
    arguments = (corpus, "test", spec.seq_len, 11, 2, CPU, "bpe:0123", True)
    return *found, evaluate_split(model, *arguments)


def same_as_one_process(spec, corpus, shard_from: int) -> int:
    torch.manual_seed(0)
    model = LanguageModel(spec.model)
    one, targets, figures = scored(model, spec, corpus)
    assert one.sequences == 11 and one.n_real < one.n_all and one.gap_pairs > 0
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    distributed.SHARD_FROM = shard_from
    distributed.spread(model, CPU)
    ours, mine, ours_figures = scored(model, spec, corpus)
    for name, value in asdict(one).items():
        if name == "per_sequence":
            for found, expected in zip(ours.per_sequence, value, strict=True):
                assert found == pytest.approx(expected, **CLOSE)
        else:
            assert getattr(ours, name) == pytest.approx(value, **CLOSE), name
            assert type(getattr(ours, name)) is type(value)
    for ids, expected in zip(mine, targets[rank() :: world()], strict=True):
        assert (ids == expected).all()
    for found, expected in zip(ours_figures, figures, strict=True):
        assert found.value == pytest.approx(expected.value, **CLOSE), found.name
        same = {"value": 0.0, "stderr": None}
        assert found.model_copy(update=same) == expected.model_copy(update=same)
    dist.destroy_process_group()
    return 0


@pytest.mark.parametrize(("ranks", "shard_from"), [(2, 10**9), (3, 1)], ids=["ddp", "fsdp2"])
def test_every_figure_is_that_of_one_process(text, tmp_path, ranks, shard_from):
    spec = make_spec(text.data)
    for done in together(tmp_path, ranks, same_as_one_process, spec, text.corpus, shard_from):
        assert done.code == 0, done.err
