"""What a section shows besides printed numbers: further texts, zero-shot scores, runs to come."""

from collections import defaultdict
from typing import Any

from mol.report.readings import OF_TEST

Row = dict[str, Any]


def text_rows(runs: list[Row]) -> list[Row]:
    """Losses on the held-out splits and on every further text, of the runs that read such texts.
    PAD masked where there is any."""
    rows = []
    for run in runs:
        of_text: dict[str, Row] = {}
        for metric in run["metrics"]:
            name, labels = metric["name"].removeprefix("text_"), metric["labels"]
            text = labels.get("text") or metric["split"]
            if name in ("nll", "bits_per_byte") and text and metric["pad"] != "pad_counted":
                row = {"run": run, "text": text, "held_out": "text" not in labels}
                of_text.setdefault(text, row)[name] = metric
        if any(not row["held_out"] for row in of_text.values()):
            rows += of_text.values()
    return rows


def score_rows(runs: list[Row], versions: dict[str, str]) -> list[Row]:
    """Zero-shot scores by scale, task, metric and run, each with what must be known of its test.
    `versions`: of the tasks in the paper's harness."""
    rows = [
        {"run": run, "task": str(metric["labels"]["task"]), "metric": metric}
        for run in runs
        for metric in run["metrics"]
        if run["kind"] == "zeroshot" and "task" in metric["labels"]
    ]
    rows.sort(
        key=lambda row: (
            row["run"]["scale"],
            row["task"],
            row["metric"]["name"],
            row["run"]["run_id"],
        )
    )
    tests: dict[tuple, dict[str, set]] = defaultdict(lambda: defaultdict(set))
    for row in rows:
        for key in OF_TEST:
            tests[_same_name(row)][key].add(row["metric"]["labels"].get(key))
    for row in rows:
        labels, flags = row["metric"]["labels"], []
        unlike = [key.replace("_", " ") for key, values in tests[_same_name(row)].items()
                  if len(values) > 1]  # fmt: skip
        if unlike:
            flags.append(f"rows of this task differ in {', '.join(unlike)} and are not compared")
        wanted = versions.get(_same_name(row)[1])
        if wanted not in (None, labels.get("task_version")) and "task_version" in labels:
            flags.append(f"the paper's harness has version {wanted} of this task")
        row["flags"] = flags
    return rows


def _same_name(row: Row) -> tuple[str, str, str]:
    """Scale, task and metric; the same task on other items goes by the same name here."""
    return row["run"]["scale"], row["task"].partition(" (")[0], row["metric"]["name"]
