"""The paper's derived numbers, judged: the verdicts by hand-made cases, then the known ones."""

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mol.base import UserError
from mol.cli import main
from mol.model.counts import active_parameters, total_parameters
from mol.paper.derivations import Check, check_paper, judge, load_checks
from mol.paper.reported import load_paper
from mol.plan.experiments import load_experiments


def check(printed="2.98", expr="a - b", reading="", **inputs):
    inputs = inputs or {"a": "33.93", "b": "30.95"}
    sources = {name: {"place": "here", "printed": text} for name, text in inputs.items()}
    return Check(id="x", place="there", printed=printed, expr=expr, inputs=sources, reading=reading)


def verdict(*args, **inputs):
    return judge(check(*args, **inputs), {}).verdict


def test_agrees_when_the_printed_inputs_give_the_printed_result():
    row = judge(check(), {})
    assert row.verdict == "agrees"
    assert row.value == pytest.approx(2.98)
    assert (row.low, row.high) == pytest.approx((2.97, 2.99))


def test_agrees_only_unrounded_when_some_hidden_digits_do():
    assert verdict("+5.0", a="54.38", b="49.33") == "agrees only unrounded"


def test_contradicted_when_no_hidden_digits_do():
    assert verdict("15.6", "n / p", n="20B", p="0.61B") == "contradicted"


def test_not_checkable_needs_a_reason():
    row = judge(Check(id="x", place="5.5", printed="1.45", reading="nothing printed"), {})
    assert row.verdict == "not checkable" and row.value is None
    with pytest.raises(ValueError, match="reading that says why"):
        Check(id="x", place="5.5", printed="1.45")


def test_adjoining_rounding_intervals_do_not_meet():
    assert verdict("0.005", "s / 100", s="0.4") == "contradicted"  # 0.45 would print as 0.5


def test_exact_inputs_hide_nothing():
    source = {"place": "here", "printed": "12", "exact": True}
    row = judge(Check(id="x", place="p", printed="24", expr="2 * a", inputs={"a": source}), {})
    assert (row.low, row.high) == (24, 24)


def test_a_flag_is_raised_by_its_bound():
    def flagged(bound):
        return Check(
            id="x",
            kind="flag",
            place="p",
            bound=bound,
            what="z",
            expr="a",
            inputs={"a": {"place": "q", "printed": "1.39"}},
            reading="weak",
        )

    assert judge(flagged("<1.96"), {}).verdict == "flag"
    assert judge(flagged(">1.96"), {}).verdict == "no flag"


@given(
    st.decimals(-500, 500, places=5, allow_nan=False),
    st.decimals(-500, 500, places=5, allow_nan=False),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_true_arithmetic_is_never_contradicted(a, b, digits_in, digits_out):
    """Round inputs and result of a true difference: whatever the digits, it is not contradicted."""
    text = [f"{x:.{digits_in}f}" for x in (a, b)]
    printed = f"{a - b:.{digits_out}f}"
    if float(printed) == 0:
        return  # a printed zero has lost its sign
    assert verdict(printed, a=text[0], b=text[1]) in ("agrees", "agrees only unrounded")


@given(
    st.decimals(1, 500, places=2, allow_nan=False),
    st.decimals(1, 500, places=2, allow_nan=False),
    st.integers(2, 9),
)
def test_an_error_beyond_all_rounding_is_contradicted(a, b, error):
    printed = f"{a - b + error * 3:.2f}"
    assert verdict(printed, a=f"{a:.1f}", b=f"{b:.1f}") == "contradicted"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('id = "a"\nof = "t1.a"\nexpr = "x"\ninputs = { y = "t1.b" }', "differ in x, y"),
        ('id = "a"\nof = "t1.a"\nprinted = "2"\nplace = "p"\nreading = "r"', "exactly one of"),
        ('id = "a"\nprinted = "2"\nreading = "r"', "place goes with"),
        ('id = "a"\nplace = "p"\nbound = "2"\nwhat = "w"\nreading = "r"', "a bound looks like"),
        ('id = "a"\nof = "t1.a"\nkind = "flag"\nreading = "r"', "a flag needs"),
        ('id = "a"\nof = "t1.a"\nexpr = "x +"', "no expression"),
        ('id = "a"\nof = "t1.a"\ncolour = "red"\nreading = "r"', "colour"),
        ('place = "p"\nprinted = "two"\nreading = "r"\nid = "a"', "not a printed number"),
    ],
)
def test_a_malformed_check_is_named(tmp_path, entry, message):
    (tmp_path / "derivations.toml").write_text(f"[[check]]\n{entry}\n")
    with pytest.raises(UserError, match=message) as caught:
        load_checks(tmp_path)
    assert "derivations.toml: check a" in str(caught.value) and "\n" not in str(caught.value)


def test_a_repeated_check_and_an_unknown_key(tmp_path):
    path = tmp_path / "derivations.toml"
    path.write_text('[[check]]\nid = "a"\nof = "t"\nreading = "r"\n' * 2)
    with pytest.raises(UserError, match="check a occurs twice"):
        load_checks(tmp_path)
    path.write_text("[[checks]]\n")
    with pytest.raises(UserError, match="unknown key 'checks'"):
        load_checks(tmp_path)


def test_unknown_cells_and_undefined_expressions_are_named():
    with pytest.raises(UserError, match="check x: 't9' is not a cell"):
        judge(Check(id="x", of="t9", reading="r"), {})
    with pytest.raises(UserError, match="check x: division"):
        judge(check("1", "1 / (a - b)", a="1.0", b="1.0"), {})


@pytest.fixture(scope="module")
def rows():
    return {row.id: row for row in check_paper(load_paper())}


CONTRADICTED = """
    app-j.tokens-both s5p7.tokens-per-active app-c.target app-c.closed-30p26 abstract.crossover-h100
    s5p6.crossover-h100 s4p2.batch-80m s4p1.tokens-80m s5p4.tokens-80m s4p1.steps-80m
    s2p2.d-head-dense-1p3b t06.stderr-low-t14 t06.stderr-high-t14 s5p7.sigma app-i.sigma
    shape.t03.deltanet-1p2of5.params vocabulary.t03.deltanet-1p2of5.params s5p6.path
    shape.t05.mol.active.with shape.t13.1p1of5.active.with shape.t07.mol-all-softmax-2p08b
    s3p1.gap-3of15 s3p1.gap-3of5 txt.s5p7.decode-low txt.s5p7.decode-high s5p6.dense-oom
    s5p6.ppl-before s5p5.memory fig1.crosses-below s2p3.width-all s5p6.gpu-classes app-b.flops
"""
UNROUNDED = """
    t11.std.softmax-1p2of5 t12.1024.growth t12.24576.growth txt.s5p5.winogrande
    app-j.tokens-dense
"""


@pytest.mark.parametrize("name", CONTRADICTED.split())
def test_known_contradictions_come_out(rows, name):
    assert rows[name].verdict == "contradicted"


@pytest.mark.parametrize("name", UNROUNDED.split())
def test_known_roundings_come_out(rows, name):
    assert rows[name].verdict == "agrees only unrounded"


def test_known_figures(rows):
    assert rows["s5p7.tokens-per-active"].value == pytest.approx(32.787, abs=1e-3)
    assert rows["app-c.closed-30p26"].value == pytest.approx(57.49, abs=0.01)
    assert rows["abstract.crossover-a100"].value / 1024 == pytest.approx(92.1, abs=0.05)
    assert rows["abstract.crossover-h200"].value / 1024 == pytest.approx(117.3, abs=0.05)
    assert rows["abstract.crossover-h100"].value / 1024 == pytest.approx(131.8, abs=0.05)
    assert rows["abstract.crossover-3090"].value / 1024 == pytest.approx(5.7, abs=0.05)
    assert rows["abstract.winogrande-z"].value == pytest.approx(1.394, abs=1e-3)
    assert rows["s5p5.mmlu-z"].value == pytest.approx(4.825, abs=1e-3)
    assert rows["s5p5.cosmo-speed"].verdict == "not checkable"


def test_the_self_audit_is_as_large_as_it_says(rows):
    """Restated figures and parameter counts apart, at least 160 numbers are recomputed."""
    checks = [r for r in rows.values() if r.kind == "check" and r.verdict != "not checkable"]
    computed = [
        r for r in checks if r.expr != "x" and not re.match("shape|vocabulary|pool|extras", r.id)
    ]
    assert len(computed) >= 160
    assert len([r for r in rows.values() if r.kind == "flag"]) >= 20


def test_formulas_of_shapes_count_what_the_models_hold(rows):
    """The weights written out as expressions equal those of the models built on the meta device."""
    plan = load_experiments()
    models = {name: plan.model(name) for name in plan.conditions}
    compared = 0
    for cell in load_paper().cells:
        row = rows.get(f"shape.{cell.cell_id}")
        if row and cell.metric == "params_total" and cell.condition in models:
            assert row.value == total_parameters(models[cell.condition]), cell.cell_id
            compared += 1
    assert compared >= 40
    exact = {
        "shape.t05.mol.active.with": ("mol-2p08b", "with_delta_extras"),
        "shape.t05.mol.active.without": ("mol-2p08b", "without_delta_extras"),
        "shape.t13.1p2of5.active.without": ("fineweb-1p2of5", "without_delta_extras"),
        "shape.txt.s5p2.active.with": ("deltanet-1p3of15", "with_delta_extras"),
    }
    for name, (condition, rule) in exact.items():
        assert rows[name].value == active_parameters(models[condition], rule), name


def test_every_finding_is_explained_and_no_agreement_is(rows):
    for row in rows.values():
        if row.verdict in ("contradicted", "not checkable", "flag"):
            assert len(row.reading) > 20, row.id
        if row.verdict == "contradicted":
            assert row.inputs and all(source.place for source in row.inputs), row.id
        if row.verdict == "agrees":
            assert not row.reading, f"{row.id} agrees, yet its reading explains a contradiction"


def test_each_derived_cell_has_a_check():
    paper = load_paper()
    targets = {entry.of for entry in load_checks(paper.folder)}
    missing = [c.cell_id for c in paper.cells if c.kind == "derived" and c.cell_id not in targets]
    assert missing == []


def test_command_lists_rows_and_imports_no_torch(capsys):
    assert main(["check-paper", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"id", "verdict", "place", "printed", "expr", "value", "low", "high"} <= rows[0].keys()
    assert main(["check-paper"]) == 0
    text = capsys.readouterr().out
    assert "contradicted: 5.7, ~15.6" in text and "agrees: " not in text
    script = (
        "import sys; from mol.cli import main; main(['check-paper']); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_command_names_a_folder_without_data(tmp_path, capsys):
    assert main(["check-paper", "--paper", str(tmp_path)]) == 2
    assert "conditions.toml" in capsys.readouterr().err
