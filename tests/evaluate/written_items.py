"""A few written items of every zero-shot set, with the hub's columns."""

import random

import pyarrow as pa
from lm_eval.tasks import TaskManager

from mol.evaluate import items, tasks

SUBJECTS = sorted(
    entry.cfg["dataset_name"]
    for name, entry in TaskManager(
        include_path=tasks.STOCK / "mmlu" / "default", include_defaults=False
    ).task_index.items()
    if entry.yaml_path and entry.cfg.get("dataset_path") == "cais/mmlu"
)
WRITTEN: set[str] = set()  # hashes of the sets that tests wrote
NOUNS = "lamp river engine violin meadow anchor copper pencil garden bridge".split()


def noun_phrases(rng: random.Random, count: int) -> list[str]:
    """Different phrases of different lengths, none the start of another."""
    firsts = rng.sample(NOUNS, count)
    return [" ".join([first, *rng.choices(NOUNS, k=rng.randint(0, 5))]) for first in firsts]


def written_tables(count: int = 6) -> dict[tuple[str, str], pa.Table]:
    """`count` items of every set with the hub's columns, one to three of each subject."""
    rng = random.Random(11)
    found: dict[tuple[str, str], list[dict]] = {}

    def add(name: str, split: str, row: dict) -> None:
        found.setdefault((name, split), []).append(row)

    for i in range(count):
        options = noun_phrases(rng, 4)
        add("hellaswag", "validation", {
            "activity_label": "Having  fun", "ctx_a": f"The {options[0]} of {i} [step] is old.",
            "ctx_b": "she", "endings": [f"goes on [title] {o} ." for o in options],
            "label": str(i % 4),
        })  # fmt: skip
        add("piqa", "validation", {
            "goal": f"Mend {i} of the {options[2]}", "sol1": options[0], "sol2": options[1],
            "label": i % 2,
        })  # fmt: skip
        add("winogrande", "validation", {
            "sentence": f"In {i} the {options[0]} beat the {options[1]} because _ was strong.",
            "option1": options[0], "option2": options[1], "answer": str(1 + i % 2),
        })  # fmt: skip
        for name in ("arc_easy", "arc_challenge"):
            n = 3 + i % 3
            options = noun_phrases(rng, n)
            add(name, "test", {
                "id": f"{name}-{i}", "question": f"Which {i}, of the {options[0]}?",
                "choices": {"text": options, "label": list("ABCDE"[:n])},
                "answerKey": "ABCDE"[i % n],
            })  # fmt: skip
        options, truth = noun_phrases(rng, 4), [1, *(int(j == i % 3) for j in range(3))]
        add("truthfulqa", "validation", {
            "question": f"Is {i} a {rng.choice(NOUNS)}?",
            "mc1_targets": {"choices": options[:3], "labels": [1, 0, 0]},
            "mc2_targets": {"choices": options, "labels": truth},
        })  # fmt: skip
    for place, subject in enumerate(SUBJECTS):
        for split, rows in (("test", 1 + place % 3), ("dev", 5)):
            for i in range(rows):
                add("mmlu", split, {
                    "question": f" What is {split} {i}? ", "subject": subject,
                    "choices": noun_phrases(rng, 4), "answer": (place + i) % 4,
                })  # fmt: skip
    return {key: pa.Table.from_pylist(rows) for key, rows in found.items()}


def write_items(folder, tables: dict[tuple[str, str], pa.Table]) -> items.ItemIndex:
    sets: dict = {}
    for key, table in tables.items():
        file = items.item_file(key, table, "written here")
        items.write_table(folder / file.file, table)
        WRITTEN.add(file.items_sha256)
        sets.setdefault(key[0], {})[key[1]] = file
    index = items.ItemIndex(sets=sets)
    (folder / items.INDEX).write_text(index.model_dump_json(), "utf-8")
    return index
