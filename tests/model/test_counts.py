"""Counts of the built models against numbers worked out by hand-written formulas elsewhere."""

import json

import pytest

from mol.cli import main
from mol.model.config import ModelConfig
from mol.model.counts import active_parameters, matches, paper_rows, total_parameters
from mol.plan.experiments import load_experiments

TOTALS = {
    "dense-softmax-85m": 84_722_688,
    "dense-softmax-198m": 198_165_504,
    "dense-deltanet-85m": 84_723_456,
    "ct-moe": 84_722_688,
    "ct-moe-se": 84_722_688 + 896,
    "ct-moe-n4096-k12": 138_200_064,
    "ct-moe-n4096-k32": 138_200_064,
    "ct-moe-n4096-k64": 138_200_064,
    "ct-moe-n4096-k128": 138_200_064,
    "high-rank-reference": 290_341_892,
    "rank1-mirror": 322_712_064,
    "rank1-k7-all": 85_611_520,
    "rank1-k7-mid6": 85_389_312,
    "rank1-k18": 86_095_872,
    "rank1-k40": 84_679_680,
    "rank1-k1": 51_419_136,
    "mol-top3": 85_300_224,
    "mol-all-active": 85_300_224 - 8 * 5 * 1024,  # no router
    "sparse-3of5": 85_300_224,
    "sparse-3of15": 190_354_432 + 8 * 1024,  # 15 candidates for the router, not 14
    "softmax-1p2of5": 85_292_032,
    "softmax-1p2of5-iso": 87_524_352,
    "deltanet-1p2of5": 87_522_560,
    "softmax-1p2of15": 190_354_432,
    "deltanet-1p2of15": 198_161_280,
    "deltanet-1p3of15": 198_161_280,
    "k1-softmax-d128": 36_445_184,
    "k1-softmax-d256": 43_267_072,
    "k1-softmax-d512": 66_348_032,
    "k1-softmax-d1024": 150_258_688,
    "k1-deltanet-d128": 36_589_088,
    "k1-deltanet-d256": 43_824_704,
    "k1-deltanet-d512": 68_544_128,
    "k1-deltanet-d1024": 158_975_744,
    "cosmo-dense-softmax": 103_417_856,
    "cosmo-dense-deltanet": 103_418_624,
    "cosmo-mol-top3": 103_995_392,
    "cosmo-deltanet-1p2of5": 106_217_728,
    "cosmo-moe-ffn": 106_080_256,
    "fineweb-dense-152m": 152_176_640,
    "fineweb-dense-98m": 97_650_688,
    "fineweb-1p3of15": 216_856_448,
    "fineweb-1p3of10": 161_537_088,
    "fineweb-1p3of5": 106_217_728,
    "fineweb-1p1of5": 228_176_384,
    "fineweb-1p2of5": 132_042_048,
    "dense-1p3b": 1_311_182_848,
    "dense-0p7b": 707_203_072,
    "mol-2p08b": 2_084_395_264,
    "mol-all-softmax-2p08b": 1_992_159_232,
    "dense-deltanet-1p3b": 1_415_388_160,
}
# with the DeltaNet extras, without them
ACTIVE = {
    "deltanet-1p3of15": (76_548_800, 74_875_904),
    "fineweb-1p3of15": (95_243_968, 93_571_072),
    "fineweb-1p3of10": (95_203_008, 93_530_112),
    "fineweb-1p3of5": (95_162_048, 93_489_152),
    "fineweb-1p1of5": (120_851_072, 118_654_976),
    "fineweb-1p2of5": (99_477_664, 97_745_920),
    "mol-2p08b": (626_992_768, 607_227_904),
}
# The numbers the paper prints that its own architecture does not give.
CONTRADICTED = {
    ("3.3", "k1-deltanet-d256", "~43M"),
    ("Table 3", "cosmo-deltanet-1p2of5", "106.0M"),
    ("5.6", "mol-all-softmax-2p08b", "2.08B"),
    ("5.6", "dense-deltanet-1p3b", "1.3B"),
}


def model(slug: str) -> ModelConfig:
    return load_experiments().model(slug)


def changed(config: ModelConfig, **layer) -> ModelConfig:
    return config.model_copy(update={"layer": config.layer.model_copy(update=layer)})


def test_totals_cover_every_condition():
    assert set(TOTALS) == set(load_experiments().conditions)


@pytest.mark.parametrize("slug", TOTALS)
def test_total(slug):
    assert total_parameters(model(slug)) == TOTALS[slug]


@pytest.mark.parametrize("slug", ACTIVE)
def test_active_under_both_rules(slug):
    counts = tuple(
        active_parameters(model(slug), rule)
        for rule in ("with_delta_extras", "without_delta_extras")
    )
    assert counts == ACTIVE[slug]


def test_active_of_experts():
    dense = model("dense-softmax-85m")
    assert active_parameters(dense) == TOTALS["dense-softmax-85m"]
    # Table 3: 2 of 5 experts of 2 x 1024 x 256 idle; CT-MoE: 1012 of 1024 pairs idle.
    assert TOTALS["cosmo-moe-ffn"] - active_parameters(model("cosmo-moe-ffn")) == 8 * 2 * 2**19
    assert TOTALS["ct-moe"] - active_parameters(model("ct-moe")) == 8 * 1012 * 2 * 1024
    idle = 4 * 252 * (2 * 512 * 256 + 256 + 512)
    assert TOTALS["high-rank-reference"] - active_parameters(model("high-rank-reference")) == idle
    idle = 8 * 7 * (256 - 12) * 2 * 256
    assert TOTALS["rank1-k7-all"] - active_parameters(model("rank1-k7-all")) == idle


def test_the_iso_parameter_width_is_the_nearest_to_the_deltanet_model():
    iso = model("softmax-1p2of5-iso")
    gaps = [total_parameters(changed(iso, d_ff=f)) - 87_522_560 for f in range(1132, 1136)]
    assert gaps == [-18_688, 1_792, 22_272, 42_752]


@pytest.mark.parametrize(
    ("width", "extra"), [(256, 70_728), (320, 109_514), (512, 276_560), (1024, 1_093_728)]
)
def test_extra_weights_of_a_deltanet_layer(width, extra):
    layer = {"kind": "dense", "n_heads": width // 64, "d_ff": 64}
    softmax = ModelConfig(vocab_size=64, d_model=width, n_layers=1, layer=layer)
    deltanet = changed(softmax, attention="deltanet")
    biases = 4 * width
    assert total_parameters(deltanet) - total_parameters(softmax) + biases == extra


def test_every_row_of_the_paper():
    rows = paper_rows()
    assert all(
        row["computed"] == TOTALS[row["configuration"]] for row in rows if row["rule"] == "total"
    )
    covered = {row["configuration"] for row in rows if row["rule"] == "total"}
    assert covered == set(TOTALS)
    for i, rule in enumerate(("active_with_delta_extras", "active_without_delta_extras")):
        active = {r["configuration"]: r["computed"] for r in rows if r["rule"] == rule}
        assert active == {slug: counts[i] for slug, counts in ACTIVE.items()}
    shares = [round(row["computed"] * 1e8) for row in rows if row["rule"] == "projection_share"]
    assert shares == [39_953_180, 57_047_354, 72_572_644]
    assert [row["computed"] for row in rows if row["rule"] == "extra"] == [896]


def test_the_paper_contradicts_itself_in_four_totals_and_mixes_two_active_rules():
    rows = paper_rows()
    wrong = {
        (row["place"], row["configuration"], row["printed"])
        for row in rows
        if row["match"] is False and not row["rule"].startswith("active")
    }
    assert wrong == CONTRADICTED
    agreeing = {
        (row["configuration"], row["rule"].removeprefix("active_"))
        for row in rows
        if row["match"] and row["rule"].startswith("active")
    }
    with_extras = {"deltanet-1p3of15", "fineweb-1p3of15", "fineweb-1p3of10", "fineweb-1p3of5"}
    without = {"fineweb-1p1of5", "fineweb-1p2of5", "mol-2p08b"}
    assert agreeing == {(slug, "with_delta_extras") for slug in with_extras} | {
        (slug, "without_delta_extras") for slug in without
    }


@pytest.mark.parametrize(
    ("computed", "printed", "expected"),
    [
        (84_750_000, "84.8M", True),  # half rounds up
        (84_749_999, "84.8M", False),
        (2_084_395_264, "2.08B", True),
        (43_824_704, "~43M", False),
        (896, "896", True),
        (0.39953, "40%", True),
        (0.39949, "39.9%", True),
        (103_995_392, "104.0M", True),
    ],
)
def test_matching_rounds_to_the_printed_digits(computed, printed, expected):
    assert matches(computed, printed) is expected


def test_command_prints_rows_and_succeeds_despite_mismatches(capsys):
    assert main(["counts", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == paper_rows()
    assert main(["counts"]) == 0
    assert "290,341,892" in capsys.readouterr().out


CONFIG = """
vocab_size = 100
d_model = 64
n_layers = 2
layer = { kind = "split", d_thin = 32, n_heads = 2, n_blocks = 5, top_k = 2, d_ff = 48 }
"""


def test_own_configuration(tmp_path, capsys):
    path = tmp_path / "own.toml"
    path.write_text(CONFIG)
    assert main(["counts", "--json", "--config", str(path)]) == 0
    total, active, _ = (row["computed"] for row in json.loads(capsys.readouterr().out))
    block = 2 * 64 * 32 + 4 * 32 * 32 + 4 * 32 + 2 * 32 + 2 * 32 * 48
    rest = 100 * 64 + 64 + 2 * 5 * 64
    assert (total, active) == (rest + 2 * 5 * block, rest + 2 * 2 * block)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (CONFIG.replace("d_thin = 32", "d_thin = 33"), "d_thin = 33"),
        (CONFIG.replace("d_ff", "dff"), "dff"),
        (CONFIG.replace('"split"', '"splat"'), "splat"),
        (CONFIG + "colour = 3", "colour"),
        ("vocab_size = [", "bad.toml"),
        (None, "bad.toml"),
    ],
)
def test_bad_configuration_is_one_line_and_exit_code_2(text, named, tmp_path, capsys):
    path = tmp_path / "bad.toml"
    if text is not None:
        path.write_text(text)
    assert main(["counts", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and named in error and "bad.toml" in error
