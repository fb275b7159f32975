"""Runs inside another process, under whichever lm-eval its path holds: scores stock tasks with
log-probabilities that are given. Imports nothing of this suite.

    python old_harness.py JOB.json OUT.json

JOB: "tasks" name -> {"yaml", "files" split -> parquet, "shots"}; "nats" [[context, continuation,
value], ...]. OUT: "version", and by task its "version", "items", "unknown" (requests that "nats"
lacks) and "metrics".
"""

import json
import sys
import types

# The models of old versions need packages that scoring does not; none of them is used.
sys.modules["lm_eval.models"] = types.ModuleType("lm_eval.models")

from importlib.metadata import version  # noqa: E402

from lm_eval import utils  # noqa: E402
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.api.task import ConfigurableTask  # noqa: E402
from lm_eval.evaluator import evaluate  # noqa: E402


class Given(LM):
    def __init__(self, nats: dict):
        super().__init__()
        self.nats = nats
        self.unknown: set[tuple[str, str]] = set()

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = [tuple(request.args) for request in requests]
        self.unknown |= {pair for pair in pairs if pair not in self.nats}
        return [(self.nats.get(pair, 0.0), False) for pair in pairs]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def generate_until(self, requests, disable_tqdm=False):
        raise NotImplementedError


def load(name: str, entry: dict) -> ConfigurableTask:
    config = utils.load_yaml_config(entry["yaml"], mode="full")
    config |= {"task": name, "dataset_path": "parquet", "dataset_name": None}
    config |= {"dataset_kwargs": {"data_files": entry["files"]}, "num_fewshot": entry["shots"]}
    for key in ("group", "tag", "task_alias"):
        config.pop(key, None)
    return ConfigurableTask(config=config)


def main(job_path: str, out_path: str) -> None:
    with open(job_path, encoding="utf-8") as handle:
        job = json.load(handle)
    nats = {(context, option): value for context, option, value in job["nats"]}
    found = {}
    for name, entry in job["tasks"].items():
        model, task = Given(nats), load(name, entry)
        result = evaluate(lm=model, task_dict={name: task}, bootstrap_iters=0)
        values = result["results"][name].items()
        found[name] = {
            "version": str(task.VERSION),
            "items": len(task.eval_docs),
            "unknown": len(model.unknown),
            "metrics": {
                k.partition(",")[0]: v for k, v in values if k in ("acc,none", "acc_norm,none")
            },
        }
    with open(out_path, "w", encoding="utf-8") as handle:
        json.dump({"version": version("lm_eval"), "tasks": found}, handle)


if __name__ == "__main__":
    main(*sys.argv[1:])
