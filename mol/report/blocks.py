"""What a section shows besides printed numbers: how its runs trained, further texts, zero-shot
scores, dispatch paths."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from mol.report.readings import OF_TEST
from mol.report.source import Source

if TYPE_CHECKING:
    from mol.report.figures import Figure

Row = dict[str, Any]
PATH_CHANGE = "path_ppl_change"


def training(runs: list[Row], steps: dict[str, int]) -> list[str]:
    """How the training runs of each scale below the paper's trained, in a sentence: steps out of
    the paper's (`steps`, by condition), seeds and text."""
    of: dict[tuple[str, int, int | None, str], set[int]] = defaultdict(set)
    for run in runs:
        if run["kind"] == "train" and run["scale"] != "paper":
            text = str(run["data"].get("source", "")).partition(":")[0]
            paper = steps.get(run["condition"])
            of[run["scale"], run["spec"]["optim"]["steps"], paper, text].add(run["seed"])
    lines = []
    for (scale, own, paper, text), seeds in sorted(of.items(), key=str):
        share = f"{own:,} of the paper's {paper:,} steps" if paper else f"{own:,} steps"
        names = ", ".join(map(str, sorted(seeds)))
        seed = f"seed{'s' if len(seeds) > 1 else ''} {names}"
        lines.append(f"Ours at {scale} scale: {', '.join(filter(None, (share, seed, text)))}.")
    return lines


def costed(run: Row) -> Row:
    """A run with its training speed in tokens a second and, on GPUs, its hours from start to end
    times their number; None where there is none."""
    speeds = [m["value"] for m in run["metrics"] if m["name"] == "train_tokens_per_s"]
    hours = run["wall_s"] * run["hardware_count"] / 3600 if run["device"] == "cuda" else None
    speed = speeds[0] if run["kind"] == "train" and speeds else None
    return run | {"speed": speed, "gpu_hours": hours}


def drawn(figures: list["Figure"], experiment: str) -> list["Figure"]:
    """An experiment's figures. One without a run of ours is shown only where no scale has any,
    once."""
    own = [figure for figure in figures if figure.spec.experiment == experiment]
    with_runs = {figure.spec.id for figure in own if figure.has_runs}
    last = {figure.spec.id: figure for figure in own}
    return [
        figure
        for figure in own
        if figure.has_runs or (figure.spec.id not in with_runs and last[figure.spec.id] is figure)
    ]


def claimed_paths(source: Source, experiment: str) -> dict[str, Any]:
    """In the section with a claim about the dispatch paths: the figures of every run that has
    them, whichever experiment it is of, and the printed change. Smoke runs, whose widths are not
    the paper's, are left out beside others."""
    cells = {c["cell_id"]: c for c in source.table("cells") if c["metric"] == PATH_CHANGE}
    claimed = [
        cells[row["cell_id"]]
        for row in source.table("claim_results")
        if row["experiment"] == experiment and row["cell_id"] in cells
    ]
    complete = [run for run in source.runs.values() if run["status"] == "complete"]
    rows = _path_rows(complete)
    rows = [row for row in rows if row["run"]["scale"] != "smoke"] or rows
    return {"printed": claimed[0], "rows": rows} if claimed else {}


def _path_rows(runs: list[Row]) -> list[Row]:
    """Perplexity of a trained run by each dispatch path (5.6), and its change from the first path
    where it is another."""
    rows = []
    for run in runs:
        by_path = {
            (metric["name"], metric["labels"]["path"]): metric
            for metric in run["metrics"]
            if metric["name"] in ("path_ppl", PATH_CHANGE)
        }
        rows += [
            {"run": run, "path": path, "ppl": ppl, "change": by_path.get((PATH_CHANGE, path))}
            for (name, path), ppl in by_path.items()
            if name == "path_ppl"
        ]
    return rows


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
