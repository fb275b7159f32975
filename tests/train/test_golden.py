"""Golden losses: exact for a torch and processor that have them, within 1e-5 for others."""

import pytest
from golden import LAYERS, STEPS, kept, key, losses

RELATIVE = 1e-5


@pytest.mark.parametrize("name", LAYERS)
def test_losses_are_the_golden_ones(name, capsys):
    golden, mine = kept(), losses(name)
    assert golden and all(found.keys() == LAYERS.keys() for found in golden.values())
    exact = key() in golden
    against = [key()] if exact else list(golden)
    how = "bit for bit" if exact else f"within {RELATIVE:g} of {' and of '.join(against)}"
    with capsys.disabled():
        print(f"\ngolden losses of {name} on {key()}: {how}")
    for expected in (golden[which][name] for which in against):
        assert len(expected) == STEPS and expected[-1] < expected[0] - 0.1
        assert mine == (expected if exact else pytest.approx(expected, rel=RELATIVE))


def test_a_golden_loss_sees_a_small_change(monkeypatch):
    """Weights that start one percent larger."""
    from mol.model.attention import SoftmaxAttention

    init = SoftmaxAttention.init_weights
    monkeypatch.setattr(
        SoftmaxAttention,
        "init_weights",
        lambda self, std, residual: init(self, std * 1.01, residual),
    )
    golden = next(iter(kept().values()))["dense softmax"]
    assert losses("dense softmax") != pytest.approx(golden, rel=RELATIVE)
