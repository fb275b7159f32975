import json

import pytest
import torch

from mol.bench.config import PrefillBench
from mol.bench.run import CPU_NOTE
from mol.cli import main
from mol.plan.build import plan
from mol.store.record import load_record

SHARDING = ["bench", "sharding", "--devices", "4", "--ranks"]


def test_a_record_is_written_and_printed(tmp_path, capsys):
    assert main([*SHARDING, "--json", "--results", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    (path,) = tmp_path.glob("runs/smoke/*/record.json")
    record = load_record(path)
    assert printed["run_id"] == record.run_id == path.parent.name
    assert record.spec.bench.devices == 4
    assert record.hardware.device == "cpu" and record.hardware.name
    assert sum(m.name == "params_per_device" for m in record.metrics) == 4


def test_a_planned_run_is_run_unchanged(tmp_path, capsys):
    planned = next(r for r in plan("smoke") if r.spec.condition == "dispatch")
    spec_file = tmp_path / "spec.json"
    spec_file.write_text(planned.spec.model_dump_json())
    path = tmp_path / "runs/smoke" / planned.run_id / "record.json"
    for words in (["--run", planned.run_id], ["--spec", str(spec_file), "--threads", "1"]):
        assert main(["bench", *words, "--results", str(tmp_path)]) == 0
        assert load_record(path).spec == planned.spec
        assert "dispatch_speedup" in capsys.readouterr().out
        path.unlink()


def test_a_timing_on_a_cpu_says_so(tmp_path):
    words = ["prefill", "--device", "cpu", "--lengths", "8", "--models", "dense-1p3b"]
    assert (
        main(["bench", *words, "--repeats", "1", "--warmup", "0", "--results", str(tmp_path)]) == 0
    )
    (path,) = tmp_path.glob("runs/smoke/*/record.json")
    record = load_record(path)
    assert CPU_NOTE in record.notes
    assert isinstance(record.spec.bench, PrefillBench)
    assert list(record.spec.bench.models) == ["dense-1p3b"]
    assert [m.labels["length"] for m in record.metrics] == [8]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--run"),
        (["prefill", "--run", "x"], "--run"),
        (["--spec", "nonesuch.json"], "nonesuch.json"),
        (["sharding", "--threads", "0"], "--threads"),
        (["--run", "no-such-run"], "no-such-run"),
        (["prefill", "--lengths", "0"], "lengths"),
        (["prefill", "--lengths", "8", "8"], "a value stands twice"),
        (["prefill", "--models", "nonesuch"], "nonesuch"),
        (["prefill", "--attention", "flash", "flash"], "a value stands twice"),
        (["prefill", "--attention", "nonesuch"], "'flash_attn', got 'nonesuch'"),
        (["decode", "--attention", "flash"], "attention"),
        (["prefill", "--condition", "ct-moe"], "--models"),
        (["sharding", "--dtype", "bf16"], "dtype"),
        (["sharding", "--lengths", "5"], "lengths"),
        (["sharding", "--ranks", "7"], "ranks"),
        (["dispatch", "--lengths", "5", "6"], "one length"),
        (["dispatch", "--run-as", "compiled"], "bf16"),
        (["train-step"], "--condition"),
        (["train-step", "--condition", "nonesuch"], "nonesuch"),
        (["train-step", "--condition", "ct-moe", "--lengths", "5", "6"], "one length"),
        (["train-step", "--condition", "ct-moe", "--models", "ct-moe"], "--models"),
        (
            ["train-step", "--condition", "ct-moe", "--accumulate", "3"],
            "cases.ct-moe: batch_size = 4 is no multiple of accumulate\n",
        ),
        (["prefill", "--lengths", "0"], "lengths.0: Input should be greater than 0, got 0\n"),
        (["prefill", "--lengths", "0", "8", "-1"], "got 0 (and 1 more)\n"),
        (["train-step", "--condition", "ct-moe", "--paths", "loop"], "paths"),
        (["prefill", "--accumulate", "2"], "--accumulate"),
        (["--run", "sharding", "--device", "cpu"], "--device"),
        (["--run", "ct-moe"], "ct-moe"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(words, says, capsys, tmp_path):
    assert main(["bench", *words, "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and says in error
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_absent_gpu_is_one_line_and_exit_2(capsys, tmp_path):
    assert main(["bench", "prefill", "--device", "cuda", "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "cpu" in error
