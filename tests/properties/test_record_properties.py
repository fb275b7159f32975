"""Records: what is written is read back, and whatever else lies there is refused, never a crash."""

import copy
import json
import math
import sys
from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mol.base import UserError
from mol.plan.build import plan
from mol.store.record import Metric, Protocol, Record, Unit, load_record, save_record

QUICK = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SPECS = [next(p.spec for p in plan("smoke") if p.spec.kind == kind)
         for kind in ("train", "zeroshot", "bench")]  # fmt: skip
words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30)
finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(0, sys.float_info.max)
whole = st.integers(-(2**63), 2**63 - 1)
moments = st.datetimes(datetime(1970, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))
protocols = st.builds(
    Protocol,
    tokenizer=words,
    pad=st.sampled_from(["masked", "pad_counted", "none"]),
    layout=st.sampled_from(["chunked", "stream", "documents"]),
    context=st.integers(1, 2**40),
    stride=st.integers(1, 2**40),
    split=st.sampled_from(["train", "validation", "test"]),
)
metrics = st.builds(
    Metric,
    name=words,
    value=finite,
    unit=st.sampled_from(Unit.__args__),
    n=st.none() | st.integers(0, 2**63 - 1),
    stderr=st.none() | positive,
    low=st.none() | finite,
    high=st.none() | finite,
    protocol=st.none() | protocols,
    labels=st.dictionaries(words, words | whole | finite | st.booleans(), max_size=3),
)


@st.composite
def records(draw):
    spec = draw(st.sampled_from(SPECS))
    return Record.model_validate(
        {
            "run_id": spec.run_id,
            "spec": spec,
            "status": draw(st.sampled_from(["complete", "not run"])),
            "reason": draw(st.none() | words),
            "started": draw(moments),
            "finished": draw(moments),
            "wall_s": draw(positive),
            "hardware": {
                "device": draw(st.sampled_from(["cpu", "cuda"])),
                "name": draw(words),
                "threads": draw(st.integers(1, 1024)),
                "memory_gib": draw(positive),
            },
            "provenance": {
                "git_commit": draw(st.none() | words),
                "dirty": draw(st.none() | st.booleans()),
                "code_sha256": draw(words),
                "versions": draw(st.dictionaries(words, words, max_size=3)),
                "data": draw(st.dictionaries(words, words, max_size=3)),
                "command": draw(words),
            },
            "metrics": draw(st.lists(metrics, max_size=4)),
            "notes": draw(st.lists(words, max_size=3)),
        }
    )


@QUICK
@given(records())
def test_what_is_saved_is_loaded(tmp_path, record):
    save_record(tmp_path, record)
    loaded = load_record(tmp_path / "record.json")
    assert loaded == record
    for ours, theirs in zip(loaded.metrics, record.metrics, strict=True):
        assert math.copysign(1, ours.value) == math.copysign(1, theirs.value)
        assert [type(v) for v in ours.labels.values()] == [type(v) for v in theirs.labels.values()]
    first = (tmp_path / "record.json").read_bytes()
    save_record(tmp_path, loaded)
    assert (tmp_path / "record.json").read_bytes() == first


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def places(value, path=()):
    """Where something stands in nested lists and dictionaries."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


@QUICK
@given(records(), st.data())
def test_a_changed_record_is_loaded_or_refused_by_name(tmp_path, record, data):
    raw = json.loads(record.model_dump_json())
    place = data.draw(st.sampled_from(list(places(raw))))
    target = changed = copy.deepcopy(raw)
    for key in place[:-1]:
        target = target[key]
    if data.draw(st.booleans()):
        target[place[-1]] = data.draw(anything)
    else:
        del target[place[-1]]
    path = tmp_path / "record.json"
    path.write_text(json.dumps(changed))
    try:
        loaded = load_record(path)
    except UserError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        assert "delete its folder to rerun" in str(error)
    else:
        assert load_record(path) == loaded and loaded.run_id == loaded.spec.run_id


@QUICK
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_by_name(tmp_path, content):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="record.json: .*delete its folder to rerun"):
        load_record(path)
