"""A matrix of protocols: into the database or refused by name, and held against printed numbers."""

import json
from functools import partial

import duckdb
import pytest
from synthetic import CPU, record_of, train_metrics, write_train

from mol.plan.build import plan
from mol.plan.experiments import PAPER
from mol.report.protocols import headline, protocol_rows
from mol.store.ingest import build
from mol.store.matrix import Matrix, MatrixRow, save_matrix
from mol.store.record import Protocol

BASE = {
    "tokenizer": "bpe:222222222222", "pad": "masked", "layout": "chunked", "context": 255,
    "stride": 255, "split": "validation",
}  # fmt: skip


LANDS = "lands on 30.26 (Table 2, 4.3, 5.3, Appendix B)"


def row(value, *, name="ppl", unit="ppl/token", stderr=0.05, note="", **protocol):
    return MatrixRow(
        name=name, value=value, unit=unit, n=1000, stderr=stderr, note=note,
        protocol=Protocol(**BASE | protocol),
    )  # fmt: skip


def write_matrix(folder, record, rows, **changes):
    matrix = Matrix(
        run_id=record.run_id,
        trained=record.finished,
        seconds=1.0,
        hardware=CPU,
        provenance=record.provenance,
        rows=tuple(rows),
        no_raw_text="not applicable: the source has none",
    )
    return save_matrix(folder, matrix.model_copy(update=changes))


@pytest.fixture
def place(tmp_path):
    """Build a database of one run of dense-softmax-85m (printed 30.26) with a matrix."""

    class Place:
        runs, db = tmp_path / "runs", tmp_path / "mol.duckdb"
        build = staticmethod(
            partial(build, tmp_path / "mol.duckdb", tmp_path / "runs", tmp_path / "none", PAPER)
        )

        def write(self, rows, scale="paper", condition="dense-softmax-85m", **changes):
            spec = next(
                run.spec
                for run in plan(scale)
                if (run.spec.kind, run.spec.condition) == ("train", condition)
            )
            record = record_of(spec, train_metrics(spec, 3.4))
            write_train(self.runs, spec, 3.4)
            return write_matrix(self.runs / scale / spec.run_id, record, rows, **changes)

        def rows(self):
            assert self.build() == []
            return protocol_rows(self.db)

    return Place()


def test_only_a_protocol_that_lands_is_said_to_land(place):
    place.write([row(30.3), row(30.26, pad="pad_counted", stderr=None), row(24.0, stride=127)])
    near, counted, far, raw = place.rows()
    assert near["outcome"] == counted["outcome"] == LANDS
    assert far["outcome"] == "lands on no printed number" and far["compared"][0]["lands"] is False
    (match,) = near["compared"]
    assert match["difference_nats"] == pytest.approx(0.00132, abs=1e-4)
    # 0.005 of rounding, and at least 1.96 times our sampling error of 0.05, over 30.3.
    assert match["half_width"] > 0.005 / 30.26 + 1.96 * 0.05 / 30.3
    assert (raw["value"], raw["text"], raw["outcome"]) == (None, "raw", "not scored")
    assert "the source has none" in raw["note"]
    assert headline([near, counted, far, raw]) == (
        "4 figures of 1 checkpoint; 3 compared with printed numbers, 2 land on one."
    )


@pytest.mark.parametrize(
    ("protocol", "reason"),
    [
        ({"name": "ppl_word", "unit": "ppl/word"}, "not compared: other unit (ppl/word)"),
        ({"name": "bits_per_byte", "unit": "bit/byte"}, "not compared: other unit (bit/byte)"),
        ({"split": "test"}, "split"),
        ({"tokenizer": "gpt2:222222222222"}, "tokenizer"),
    ],
)
def test_unlike_protocols_are_never_compared(place, protocol, reason):
    place.write([row(30.26, **protocol)])
    unlike, _ = place.rows()
    assert unlike["compared"] == []
    assert unlike["outcome"].startswith("not compared: ") and reason in unlike["outcome"]


@pytest.mark.parametrize("scale", ["smoke", "proxy"])
def test_other_scales_are_never_compared(place, scale):
    place.write([row(30.26)], scale=scale)
    rows = place.rows()
    assert rows[0]["compared"] == [] and rows[0]["outcome"] == f"not compared: {scale} scale"
    assert headline(rows) == (
        f"2 figures of 1 checkpoint; none is compared with a printed number ({scale} scale)."
    )


def test_other_text_is_not_compared(place):
    spec = next(r.spec for r in plan("paper") if r.spec.condition == "dense-softmax-85m")
    wheel = spec.data.model_validate(spec.data.model_dump() | {"source": {"kind": "wheel"}})
    spec = spec.model_copy(update={"data": wheel})
    record = record_of(spec, train_metrics(spec, 3.4))
    write_matrix(write_train(place.runs, spec, 3.4), record, [row(30.26)])
    assert place.rows()[0]["outcome"] == "not compared: not the paper's text"


def test_without_a_matrix_there_is_nothing_to_show(place):
    place.write([row(30.0)]).unlink()
    assert place.rows() == []
    assert "`snakemake protocols`" in headline([])


BREAKS = {
    "cut off": (lambda text: text[:200], "delete it or run `mol eval --protocols --save` again"),
    "other key": (lambda text: text.replace('"seconds"', '"minutes"'), "seconds"),
    "no number": (lambda text: text.replace('"value": 30.0', '"value": "much"'), "rows.0.value"),
    "other run": (lambda text: text.replace("85m-s42", "86m-s42", 1), "is of run"),
    "other weights": (lambda text: text.replace("2026-01-01T12:01", "2026-01-01T12:07"), "anew"),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_broken_matrix_is_refused_by_name_and_the_rest_kept(place, fault, capsys):
    path = place.write([row(30.0)])
    place.write([row(31.0)], condition="dense-softmax-198m")
    change, says = BREAKS[fault]
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    (refusal,) = place.build()
    assert refusal.file == f"runs/paper/{path.parent.name}/protocols.json"
    assert says in refusal.reason and "\n" not in refusal.reason
    assert refusal.file in capsys.readouterr().err
    rows = protocol_rows(place.db)
    assert {r["condition"] for r in rows} == {"dense-softmax-198m"} and len(rows) == 2
    with duckdb.connect(place.db, read_only=True) as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (2,)
        assert database.execute("SELECT count(DISTINCT run_id) FROM curves").fetchone() == (2,)


def test_records_from_before_the_new_fields_are_read(place):
    path = place.write([row(30.0)]).parent / "record.json"
    old = json.loads(path.read_text())
    for metric in old["metrics"]:
        if metric["protocol"]:
            del metric["protocol"]["eos"], metric["protocol"]["text"]
    path.write_text(json.dumps(old))
    assert place.build() == []
