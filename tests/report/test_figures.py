import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from datetime import timedelta
from pathlib import Path

import matplotlib
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_paper import write_paper
from PIL import Image
from synthetic import H200, bench_metrics, record_of, train_metrics, write_library, write_run

from mol.base import UserError
from mol.paper.reported import load_paper
from mol.plan.build import plan
from mol.plan.experiments import PAPER
from mol.report.draw_bench import Point, _join, draw_bench
from mol.report.draw_curves import draw_curves
from mol.report.draw_ranking import draw_ranking
from mol.report.figures import load_figures, write_figures
from mol.report.number import figure_text
from mol.report.sheet import COLORS, GROUND, INK, MUTED, RC, short_number, spread
from mol.report.source import Source
from mol.store.ingest import build

DRAW = {"curves": draw_curves, "ranking": draw_ranking, "bench": draw_bench}
IDS = ["figure1", "table02", "table03", "table04", "table07", "table10", "table12"]


def source_of(folder: Path, runs: Path, paper: Path = PAPER) -> Source:
    build(folder / "mol.duckdb", runs, folder / "no-records", paper)
    return Source(folder / "mol.duckdb")


@pytest.fixture(scope="module")
def both(two_scales):
    return Source(two_scales / "mol.duckdb")


@pytest.fixture(scope="module")
def drawn(both, tmp_path_factory):
    return write_figures(both, tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("empty")
    return source_of(folder, folder / "runs")


def words(path: Path) -> str:
    """All text of an SVG, which must be well-formed."""
    texts = [
        node.text or "" for node in ElementTree.parse(path).iter() if node.tag.endswith("text")
    ]
    return " ".join(" ".join(texts).split())


def test_each_scale_has_every_figure_in_both_formats(drawn):
    assert [(f.spec.id, f.scale) for f in drawn] == [
        (name, scale) for scale in ("smoke", "paper") for name in IDS
    ]
    for figure in drawn:
        assert figure.svg.name == f"{figure.spec.id}_{figure.scale}.svg"
        assert figure.spec.title.split(":")[0] in words(figure.svg)
        assert not figure.missing
        with Image.open(figure.png) as image:
            assert 700 < image.width < 1000 and image.height > 400
            assert len(image.convert("RGB").getcolors(1 << 20)) > 20


def test_figures_state_scale_hardware_and_source(drawn):
    for figure in drawn:
        text = words(figure.svg)
        assert "run record" in text
        if figure.scale == "smoke":
            assert text.count("not a reproduction") == 2  # above the panel and in the caption
            assert "Made-up CPU, 1 thread" in text
        else:
            assert "not a reproduction" not in text and "1 x NVIDIA H200" in text


def test_same_records_give_same_bytes(both, drawn, tmp_path):
    for one, two in zip(drawn, write_figures(both, tmp_path), strict=True):
        assert one.svg.read_bytes() == two.svg.read_bytes()
        assert one.png.read_bytes() == two.png.read_bytes()
        assert b"Date" not in one.png.read_bytes() and b"dc:date" not in one.svg.read_bytes()


def test_printed_values_stand_in_the_figures_as_printed(drawn):
    texts = {f.spec.id: words(f.svg) for f in drawn if f.scale == "smoke"}
    for value in ("15.03", "18.53", "18.04", "7K", "11K"):
        assert value in texts["figure1"]
    for value in ("30.85", "32.19", "36.51", "26.89"):
        assert value in texts["table02"]
    assert "40K" in texts["table03"] and "10K-12K" in texts["table04"]
    for gpu in ("RTX 3090", "A100 SXM4 80GB", "H100 SXM 80GB", "H200"):
        assert gpu in texts["table07"]
    assert "7.81×" in texts["table10"] and "GPU not stated" in texts["table10"]


@pytest.mark.parametrize("name", [name for name in IDS if name != "table02"])
def test_no_curve_of_the_paper_is_drawn(empty, name):
    """Without runs every line is a lone marker, joined to nothing, or a vertical rule."""
    (spec,) = [spec for spec in load_figures() if spec.id == name]
    with matplotlib.rc_context(RC):
        sheet = DRAW[spec.kind](spec, empty, "smoke").sheet
    lines = [
        line
        for row in sheet.axes
        for axes in row
        for line in axes.lines
        if line.get_transform() != axes.transAxes  # leaders of the names
    ]
    assert lines
    for line in lines:
        upright = len(set(line.get_xdata())) == 1
        assert upright or line.get_linestyle() in ("None", "none")


def test_printed_points_are_the_cells(empty):
    """Figure 7's markers are Table 7's printed rates, all of them and nothing else."""
    (spec,) = [spec for spec in load_figures() if spec.id == "table07"]
    with matplotlib.rc_context(RC):
        sheet = draw_bench(spec, empty, "smoke").sheet
    drawn = sorted(
        (float(x), float(y))
        for row in sheet.axes[1:-1]
        for axes in row
        for line in axes.lines
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    )
    cells = load_paper().cells
    printed = sorted(
        (float(cell.labels["length"]), cell.number.value)
        for cell in cells
        if (cell.table, cell.metric, cell.op) == ("7", "prefill_tokens_per_s", "")
    )
    assert drawn == printed and len(printed) > 30


def test_two_runs_of_one_series_are_one_line():
    """A run at fewer lengths adds its points and takes no other's away."""
    line, key = [Point(1, 10), Point(2, 20), Point(4, 40)], ("dense", "eager")
    held = {key: line}
    _join(held, {key: [Point(2, 21), Point(8, 80)], ("mol", "loop"): [Point(1, 5)]})
    assert held == {
        key: [Point(1, 10), Point(2, 21), Point(4, 40), Point(8, 80)],
        ("mol", "loop"): [Point(1, 5)],
    }


def test_decode_of_several_sequences_is_no_point_of_table_12(tmp_path):
    """The shipped records hold batches of 8 and 64 at some of its contexts."""
    records = Path(__file__).parents[2] / "results" / "records"
    build(tmp_path / "mol.duckdb", tmp_path / "runs", records, PAPER)
    source = Source(tmp_path / "mol.duckdb")
    (spec,) = [spec for spec in load_figures() if spec.id == "table12"]
    with matplotlib.rc_context(RC):
        ((axes,),) = draw_bench(spec, source, "paper").sheet.axes[-1:]
    lines = [line.get_data() for line in axes.lines if line.get_transform() != axes.transAxes]
    drawn = sorted((x, y) for line in lines for x, y in zip(*line, strict=True))
    timed = [
        (metric["labels"]["batch"], metric["labels"]["context"], metric["value"])
        for run in source.complete("paper", "bench")
        for metric in run["metrics"]
        if metric["name"] == "decode_ms" and metric["labels"]["cache"]
    ]
    assert {batch for batch, *_ in timed} >= {1, 8, 64}
    assert drawn == sorted((x, y) for batch, x, y in timed if batch == 1)


def test_facts_name_cells_that_print_steps():
    cells = {cell.cell_id: cell for cell in load_paper().cells}
    facts = [fact for spec in load_figures() for fact in spec.facts]
    assert len(facts) >= 4
    assert all(cells[fact.cell].unit == "step" for fact in facts)


def test_missing_runs_are_named(tmp_path):
    runs = tmp_path / "runs"
    write_library(runs, "smoke")
    for folder in (runs / "smoke").iterdir():
        if folder.name.startswith(("mol-2p08b", "deltanet-1p3of15", "bench-decode")):
            shutil.rmtree(folder)
    figures = {f.spec.id: f for f in write_figures(source_of(tmp_path, runs), tmp_path / "out")}
    assert figures["figure1"].missing == ("MoL 1+3of15",)
    assert "Missing: MoL 1+3of15." in words(figures["figure1"].svg)
    assert figures["table02"].missing == ("DeltaNet 1+3of15",)
    assert len(figures["table12"].missing) == 3
    assert "no complete run" in words(figures["table12"].svg)
    assert not figures["table07"].missing


def test_empty_database_draws_the_paper_alone(empty, tmp_path):
    """And drops the figures of scales that are gone, but no file of another name."""
    for name in ("figure1_paper.svg", "my_smoke.png"):
        (tmp_path / name).write_bytes(b"old")
    figures = write_figures(empty, tmp_path)
    assert not (tmp_path / "figure1_paper.svg").exists() and (tmp_path / "my_smoke.png").exists()
    assert [f.scale for f in figures] == ["smoke"] * len(IDS)
    for figure in figures:
        assert "no complete run" in words(figure.svg)
        assert (
            figure.missing
            and "ours at smoke scale no run" in figure.alt
            or "Ours" not in figure.alt
        )


def test_crossing_lies_between_the_points_around_it(tmp_path):
    """MoL starts 0.5 nat above the dense model and loses 0.1 a point: level at the sixth."""
    runs = tmp_path / "runs"
    for planned in plan("smoke"):
        spec = planned.spec
        if spec.kind != "train" or not spec.condition.startswith("cosmo-"):
            continue
        steps = list(range(2, 31, 2))
        slope = 0.1 if spec.condition == "cosmo-mol-top3" else 0.0
        values = [4.0 + slope * (5 - index) for index in range(len(steps))]
        rows = {
            "step": steps, "tokens": [step * 64 for step in steps],
            "name": ["validation_nll"] * len(steps), "value": values,
        }  # fmt: skip
        record = record_of(spec, train_metrics(spec, values[-1]))
        write_run(runs, record, pa.table(rows))
    figures = {f.spec.id: f for f in write_figures(source_of(tmp_path, runs), tmp_path / "out")}
    text = words(figures["table03"].svg)
    assert "MoL K=5 top-3 between 12 and 14" in text
    assert "MoL 1+2of5 never" in text
    ours = math.exp(4.0 + 0.1 * (5 - 14))
    assert f"MoL K=5 top-3 {ours:.4g}" in text


def test_a_seed_that_was_trained_on_two_machines_counts_once(tmp_path):
    spec = next(p.spec for p in plan("smoke") if p.spec.condition == "dense-softmax-85m")
    first = record_of(spec, train_metrics(spec, 3.0))
    later = first.model_copy(
        update={"hardware": H200, "finished": first.finished + timedelta(hours=1)}
    )
    write_run(tmp_path / "runs", later)
    write_run(tmp_path / "records" / "cpu", first)
    build(tmp_path / "mol.duckdb", tmp_path / "runs", tmp_path / "records", PAPER)
    source = Source(tmp_path / "mol.duckdb")
    assert source.runs.keys() == {spec.run_id, f"{spec.run_id}@cpu"}
    (run,) = source.complete("smoke", "train", "dense-softmax-85m")
    assert run["run_id"] == spec.run_id


def test_hostile_hardware_name_stays_text(tmp_path):
    runs = tmp_path / "runs"
    hardware = H200.model_copy(update={"name": "</text><script>alert(1)</script> $x$ & co"})
    for planned in plan("smoke"):
        spec = planned.spec
        if spec.kind == "bench":
            write_run(runs, record_of(spec, bench_metrics(spec), hardware=hardware))
    for figure in write_figures(source_of(tmp_path, runs), tmp_path / "out")[-3:]:
        tags = {node.tag.split("}")[-1] for node in ElementTree.parse(figure.svg).iter()}
        assert "script" not in tags
        assert "$x$ & co" in words(figure.svg)


def test_another_paper_may_list_no_figures(tmp_path):
    paper = write_paper(tmp_path / "paper")
    source = source_of(tmp_path, tmp_path / "runs", paper)
    assert write_figures(source, tmp_path / "out", paper) == []


@pytest.mark.parametrize(
    "text, message",
    [
        ("figures = 3", "figures"),
        ('[[figures]]\nid = "a"\nkind = "curves"', "title"),
        (
            '[[figures]]\nid = "a"\nkind = "bench"\ntitle = "t"\nplace = "p"\n'
            'experiment = "X1"\ntable = "1"',
            "'a' is of kind bench: add series",
        ),
        ("figures = [", "figures.toml"),
    ],
)
def test_bad_figure_list_is_one_clear_line(tmp_path, text, message):
    (tmp_path / "figures.toml").write_text(text)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        load_figures(tmp_path)
    assert "figures.toml" in str(caught.value) and "\n" not in str(caught.value)


def luminance(color: str) -> float:
    channels = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("color", [INK, MUTED, *COLORS.values()])
def test_text_colors_reach_contrast_4_5(color):
    light, dark = luminance(GROUND), luminance(color)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


@given(
    st.lists(st.floats(-100, 100), min_size=1, max_size=12),
    st.floats(0.01, 20),
)
def test_spread_keeps_order_and_gap(wanted, gap):
    placed = spread(wanted, gap)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for before, after in zip(order, order[1:], strict=False):
        assert placed[after] - placed[before] >= gap * (1 - 1e-6) - 1e-9
    assert sum(placed) == pytest.approx(sum(wanted), abs=1e-6 * len(wanted))


def test_spread_leaves_what_fits():
    assert spread([3.0, 1.0, 2.0], 1.0) == [3.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "value, text", [(65536, "64K"), (20000, "20K"), (12500, "12.5K"), (512, "512"), (0.3, "0.3")]
)
def test_short_number(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize("value, text", [(12345.6, "12,346"), (30.951, "30.95"), (0.5, "0.5")])
def test_figure_text(value, text):
    assert figure_text(value) == text
