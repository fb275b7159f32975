"""Of all ways a model was timed, the fastest at each length stands against the first model's."""

import pytest

from mol.report.fastest import fastest


def timing(name, value, model, **labels):
    unit = "token/s" if name == "prefill_tokens_per_s" else "ms/token"
    return {"name": name, "value": value, "unit": unit, "labels": {"model": model} | labels}


def prefill(value, model, length=4096, **labels):
    return timing("prefill_tokens_per_s", value, model, length=length, **labels)


def decode(value, model, context=256, **labels):
    return timing("decode_ms", value, model, context=context, **labels)


def bench(metrics, run_id="one", hardware="H200", scale="paper"):
    return {
        "run_id": run_id, "scale": scale, "hardware": hardware, "hardware_count": 1,
        "metrics": metrics,
    }  # fmt: skip


def table(*runs):
    found = fastest(list(runs))
    return {
        (row["what"], row["length"], row["batch"]): {
            name: cell
            and (cell["run"]["run_id"], cell["metric"]["value"], cell["how"], cell["ratio"])
            for name, cell in zip(found["models"], row["cells"], strict=True)
        }
        for row in found["rows"]
    }


def test_the_best_of_several_runs_and_libraries_is_taken_and_named():
    ours = bench([
        prefill(100, "dense", path="dense", attention="cudnn", mode="compiled_graph"),
        prefill(210, "mol", path="one_pass", attention="cudnn", mode="graph"),
    ])  # fmt: skip
    more = bench([prefill(120, "dense", path="dense", attention="flash_attn", mode="eager")], "two")
    assert table(ours, more) == {
        ("prefill", 4096, 1): {
            "dense": ("two", 120, "flash attn, eager", None),
            "mol": ("one", 210, "one pass, cudnn, graph", 1.75),
        }
    }


def test_less_time_is_faster_and_a_step_without_cache_is_no_way_to_decode():
    run = bench([
        decode(2.0, "dense", cache=True, batch=8),
        decode(1.0, "dense", cache=False, batch=8),
        decode(0.8, "mol", cache=True, batch=8),
    ])  # fmt: skip
    cells = table(run)["decode", 256, 8]
    assert cells["dense"][1] == 2.0 and cells["mol"][3] == pytest.approx(2.5)


def test_rows_need_two_models_on_one_machine_and_smoke_gives_way():
    other = bench([prefill(900, "mol"), prefill(3, "mol", 64)], "other", hardware="A100")
    ours = bench([prefill(100, "dense"), prefill(150, "mol"), prefill(7, "dense", 8192)])
    smoke = bench([prefill(1, "dense", 64), prefill(2, "mol", 64)], "small", "CPU", "smoke")
    assert table(ours, other, smoke).keys() == {("prefill", 4096, 1)}
    assert table(ours, other)["prefill", 4096, 1]["mol"][1] == 150
    assert table(smoke, other).keys() == {("prefill", 64, 1)}
    assert fastest([other]) == {"models": [], "rows": []}
