"""`lm_eval --model hf` on an export against the suite's own adapter, by the real command line."""

import json
import os
import random
import subprocess
import sys

import pytest
import yaml
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from small_runs import FAMILIES, drawn

from mol.cli import main
from mol.data.tokenizers import load_tokenizer
from mol.evaluate.adapter import HarnessModel
from mol.evaluate.scoring import Scorer

HYBRID = FAMILIES["split-rms-top-routed-linear-shared-deltanet"]
MAX_LENGTH = 96
WORDS = "river stone mountain walked over under quick brown fox jumps the a and near".split()


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """Three local tasks of the harness's forms: options, whole texts, generated text."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    folder = tmp_path / "tasks"
    folder.mkdir()
    rng = random.Random(2)

    def phrase(low, high):
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    rows = [
        {"context": phrase(3, 60), "options": [phrase(1, 5) for _ in range(4)], "right": i % 4}
        for i in range(12)
    ]
    (folder / "items.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}},
        "test_split": "test",
    }

    def metrics(*names):
        return [{"metric": name} for name in names]

    definitions = {
        "local_options": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "{{options}}",
            "doc_to_target": "{{right}}",
            "metric_list": metrics("acc", "acc_norm"),
        },
        "local_texts": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{context}}",
            "metric_list": metrics("bits_per_byte"),
        },
        "local_words": {
            "output_type": "generate_until",
            "doc_to_text": "{{context}}",
            "doc_to_target": "{{options[0]}}",
            "generation_kwargs": {"until": ["."], "do_sample": False, "max_gen_toks": 8},
            "metric_list": metrics("exact_match"),
        },
    }
    for name, definition in definitions.items():
        text = yaml.safe_dump({"task": name} | shared | definition)
        (folder / f"{name}.yaml").write_text(text, "utf-8")
    return folder, list(definitions)


def test_lm_eval_scores_an_export_as_our_adapter_does(results, tasks, tmp_path):
    folder, names = tasks
    out = tmp_path / "exported"
    run = results.run(HYBRID)
    assert main(["export", str(run), "--to", str(out)]) == 0
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu"),
        *("--model_args", f"pretrained={out},trust_remote_code=True,max_length={MAX_LENGTH}"),
        *("--tasks", ",".join(names), "--include_path", str(folder), "--batch_size", "4"),
        *("--output_path", str(tmp_path / "found"), "--log_samples"),
    ]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = (tmp_path / "found").rglob("results_*.json")
    theirs = json.loads(file.read_text("utf-8"))["results"]

    scorer = Scorer(drawn(HYBRID), max_length=MAX_LENGTH)
    adapter = HarnessModel(scorer, load_tokenizer(results.corpus), prefix_token=results.meta.eos_id)
    ours = simple_evaluate(
        adapter,
        tasks=names,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    for name in names:
        samples = {}
        for path in (tmp_path / "found").rglob(f"samples_{name}_*.jsonl"):
            for line in path.read_text("utf-8").splitlines():
                sample = json.loads(line)
                samples[sample["doc_id"]] = sample["resps"]
        for sample in ours["samples"][name]:
            for (found,), (wanted,) in zip(samples[sample["doc_id"]], sample["resps"], strict=True):
                same(found, wanted)
        for metric, value in ours["results"][name].items():
            if isinstance(value, float) and "stderr" not in metric:
                assert theirs[name][metric] == pytest.approx(value, rel=1e-4), (name, metric)


def same(found, wanted) -> None:
    """Log-probabilities within 1e-4, text and greedy flags equal."""
    if isinstance(wanted, str):
        assert found == wanted
    elif isinstance(wanted, tuple):
        assert float(found[0]) == pytest.approx(wanted[0], abs=1e-4)
        assert str(found[1]) == str(wanted[1])
    else:
        assert float(found) == pytest.approx(wanted, abs=1e-3)
