"""The plan: the paper's runs, their topologies at every scale, and their identities."""

import json
import re
import shutil
from collections import Counter

import pytest

from mol.base import UserError
from mol.cli import main
from mol.data.config import FileSource
from mol.plan.build import Config, find_run, plan, read_config
from mol.plan.experiments import PAPER, load_experiments
from mol.plan.select import changed


def by_slug(scale):
    return {run.spec.condition: run.spec for run in plan(scale) if run.spec.kind == "train"}


def test_thirteen_experiments_with_the_conditions_and_seeds_of_the_paper():
    paper = load_experiments()
    assert list(paper.experiments) == [f"E{n:02}" for n in range(1, 14)]
    sizes = {name: len(e.conditions) for name, e in paper.experiments.items()}
    assert sizes["E04"] == 6 and sizes["E06"] == 12 and sizes["E09"] == 5 and sizes["E10"] == 7
    kinds = Counter(run.spec.kind for run in plan("smoke"))
    assert kinds == {"train": 63, "zeroshot": 3, "bench": 16}
    seeds = Counter(run.spec.condition for run in plan("smoke") if run.spec.kind == "train")
    three = {slug for slug, count in seeds.items() if count == 3}
    assert three == {
        "mol-top3", "mol-all-active", "sparse-3of5", "softmax-1p2of5-iso", "deltanet-1p2of5",
        "softmax-1p2of5", "deltanet-1p3of15",
    }  # fmt: skip


@pytest.mark.parametrize(("scale", "rest"), [("smoke", 0), ("proxy", 1), ("paper", 1)])
def test_only_e11_of_the_paper_trains_on_several_gpus_unless_told(scale, rest):
    for run in plan(scale):
        together = scale == "paper" and run.spec.kind == "train" and "E11" in run.experiments
        assert run.gpus == (4 if together else rest)
    for run in plan(scale, Config(scale=scale, gpus_per_run=3)):
        assert run.gpus == (3 if run.spec.kind == "train" else rest)


def test_rows_that_share_a_specification_share_the_run():
    shared = {run.spec.condition: run.experiments for run in plan("smoke") if run.spec.seed == 42}
    assert shared["ct-moe"] == ("E01", "E03", "E04", "E05")
    assert shared["mol-top3"] == ("E05", "E06")
    assert shared["softmax-1p2of5-iso"] == ("E06", "E07")


@pytest.mark.parametrize("scale", ["smoke", "proxy"])
def test_scaling_keeps_every_topology(scale):
    paper, scaled = by_slug("paper"), by_slug(scale)
    assert paper.keys() == scaled.keys()
    for slug, spec in paper.items():
        small = scaled[slug].model
        pairs = zip(spec.model.layers(), small.layers(), strict=False)
        for big, little in pairs:
            for name in (
                "kind",
                "attention",
                "n_heads",
                "n_blocks",
                "n_shared",
                "coverage",
                "router",
            ):
                assert getattr(big, name, None) == getattr(little, name, None), (slug, name)
            if big.kind != "ct_moe":  # rank-1 counts are ratios to the width
                assert getattr(big, "top_k", None) == getattr(little, "top_k", None), slug
        assert spec.model.anchor_at == small.anchor_at


def test_smoke_keeps_rank_one_counts_as_ratios_to_the_width():
    paper, smoke = by_slug("paper"), by_slug("smoke")
    for slug in ("rank1-mirror", "ct-moe-n4096-k128"):
        big, little = paper[slug].model, smoke[slug].model
        assert big.layer.ffn.n_experts * little.d_model == little.layer.ffn.n_experts * big.d_model
        assert big.layer.ffn.top_k * little.d_model == little.layer.ffn.top_k * big.d_model
    ks = [smoke[f"ct-moe-n4096-k{k}"].model.layer.ffn.top_k for k in (12, 32, 64, 128)]
    assert ks == sorted(set(ks)), "the four conditions of E02 must differ"


def test_paper_scale_states_the_tokens_the_paper_states():
    paper = by_slug("paper")

    def tokens(slug):
        optim = paper[slug].optim
        return optim.steps * optim.batch_size * paper[slug].seq_len

    assert round(tokens("cosmo-mol-top3") / 1e9, 2) == 14.94
    assert round(tokens("fineweb-1p3of15") / 1e9, 1) == 3.9
    assert round(tokens("mol-2p08b") / 1e9, 1) == 21.0  # 1,048,576 a step; the paper rounds to 20B
    assert paper["mol-2p08b"].optim.batch_size * paper["mol-2p08b"].seq_len == 2**20


def test_proxy_has_the_papers_epochs_and_its_schedule_in_small():
    paper, proxy = by_slug("paper"), by_slug("proxy")

    def steps_and_tokens(slug):
        spec = proxy[slug]
        return spec.optim.steps, spec.optim.batch_size * spec.seq_len

    wikitext = proxy["mol-top3"]
    assert wikitext.optim.steps == 5_000 and wikitext.optim.warmup_steps == 100
    rows = wikitext.data.max_train_tokens // wikitext.data.layout.chunk
    assert 5_000 * 64 / rows == pytest.approx(50_000 * 64 / 404_842, rel=0.01)  # 7.9 epochs
    assert steps_and_tokens("cosmo-mol-top3") == (500, 131_072)
    assert steps_and_tokens("fineweb-1p3of15") == (1_000, 65_536)
    for slug, spec in proxy.items():
        optim, whole = spec.optim, paper[slug].optim
        unchanged = {"steps", "warmup_steps"}
        assert optim.model_dump(exclude=unchanged) == whole.model_dump(exclude=unchanged)
        scaled = whole.warmup_steps * optim.steps / whole.steps
        assert scaled - 1 < optim.warmup_steps <= scaled
        if spec.data.layout.kind == "packed":  # one pass, the last target included
            tokens = optim.steps * optim.batch_size * spec.seq_len
            assert tokens < spec.data.max_train_tokens <= 65_536_001


def test_an_edited_condition_changes_its_own_runs_and_no_other(tmp_path):
    folder = tmp_path / "paper"
    shutil.copytree(PAPER, folder)
    text = (folder / "conditions.toml").read_text()
    edited = text.replace("n_heads = 16, d_ff = 768 }", "n_heads = 16, d_ff = 776 }")
    assert edited != text
    (folder / "conditions.toml").write_text(edited)
    before = {run.run_id for run in plan("smoke")}
    after = {run.run_id for run in plan("smoke", folder=folder)}
    assert {name.rsplit("-s42-")[0] for name in before ^ after} == {"fineweb-dense-98m"}


def test_run_ids_depend_on_the_source_of_the_text():
    config = Config(sources={"fineweb_edu": FileSource(train="a.txt")})
    default, other = plan("smoke"), plan("smoke", config)
    changed = {
        a.spec.condition for a, b in zip(default, other, strict=True) if a.run_id != b.run_id
    }
    assert changed == {
        run.spec.condition
        for run in default
        if run.spec.condition.startswith("fineweb-") or "E11" in run.experiments
        or run.spec.kind == "zeroshot"
    }  # fmt: skip


def test_find_run_names_the_choices():
    assert find_run("ct-moe", "smoke").spec.condition == "ct-moe"
    assert find_run("mol-top3-s137", "smoke").run_id.startswith("mol-top3-s137-")
    with pytest.raises(UserError, match="3 runs at scale smoke; choose one of mol-top3-s42-"):
        find_run("mol-top3", "smoke")
    with pytest.raises(UserError, match="mol plan --scale smoke"):
        find_run("no-such-run", "smoke")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scale: huge", "scale"),
        ("gpus_per_run: 0", "gpus_per_run: Input should be greater than 0, got 0"),
        ("gpus_per_run: 3.5", "gpus_per_run: Input should be a valid integer"),
        ("scael: smoke", "scael"),
        ("sources: {wikitext103: {kind: web}}", "sources.wikitext103"),
        ("sources: {wikitext103: {kind: file}}", "sources.wikitext103.file.train"),
        ("scale: [", "config.yaml"),
        ("scale: 2026-11-30", "2026-11-30 is a date; put it in quotes"),
        ("sources: {c4: {kind: wheel}}", "c4"),
    ],
)
def test_a_wrong_configuration_is_one_line_with_the_key(tmp_path, text, words):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_config(path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_plan_command_prints_rows(capsys):
    assert main(["plan", "--experiment", "E03", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["condition"] for row in rows] == ["ct-moe", "ct-moe-se"]
    assert all(row["train_flop"] == 6 * row["params_active"] * row["tokens"] for row in rows)
    assert main(["plan", "--experiment", "E99"]) == 2
    assert "E99" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            "model.layer.divide_by_kk=false",
            "divide_by_kk=false: no such key; .* 'model.layer.divide_by_k'",
        ),
        ("model.layer.divide_by_k", "divide_by_k: need KEY=VALUE"),
        ("model.layer.d_thin.x=1", "d_thin.x=1: no such key"),
        ("model.layer.weights_over=none", "weights_over: Input should be 'selected' or 'all'"),
        ("optim.lr=NaN", "optim.lr: Input should be a finite number"),
    ],
)
def test_a_change_on_the_command_line_is_checked_as_a_file_is(change, words, capsys):
    run = ["--run", "deltanet-1p3of15-s42", "--scale", "proxy"]
    assert main(["train", *run, "--set", change]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_changes_on_the_command_line_make_a_run_of_their_own():
    """Two that only together are a specification: rows of 48 give sequences of 47."""
    spec = find_run("deltanet-1p3of15-s42", "smoke").spec
    mine = changed(spec, ["model.layer.weights_over=all", "data.layout.chunk=48", "seq_len=47"])
    assert mine.model.layer.weights_over == "all" and mine.seq_len == 47
    assert mine.run_id != spec.run_id and mine.condition == spec.condition
    assert changed(spec, []) is spec
