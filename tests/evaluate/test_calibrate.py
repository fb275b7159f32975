"""`mol eval --calibrate` on a GPT-2 with random weights, against transformers' own loss."""

import json
import math
import re
import shutil

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from mol.cli import main
from mol.evaluate import calibrate
from mol.evaluate.adapter import HarnessModel
from mol.evaluate.calibrate import Calibration, Gpt2
from mol.evaluate.scoring import Scorer

EOS = "<|endoftext|>"
CONTEXT = 64
LINES = (
    " ", " = First Page = ", " ", " The well @-@ known river ( it is long ) ran , and ran . ",
    " = = Part = = ", " More of the text , with 1 @,@ 000 words . ", " ", " = Second Page = ", " ",
    *[" Another text about the stone , the well and the river . "] * 20,
)  # fmt: skip
TEXT = "\n".join(LINES) + "\n"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """(folder, model, tokenizer) of a small GPT-2 with random, wide weights."""
    folder = tmp_path_factory.mktemp("gpt2")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([TEXT], vocab_size=300, special_tokens=[EOS], show_progress=False)
    tokenizer = Tokenizer.from_str(bpe.to_str())
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, bos_token=EOS)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    eos = tokenizer.token_to_id(EOS)
    config = GPT2Config(
        vocab_size=tokenizer.get_vocab_size(), n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2,
        initializer_range=0.2, eos_token_id=eos, bos_token_id=eos,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(folder)
    return folder, model, fast


@pytest.fixture
def files(tmp_path):
    text, lambada = tmp_path / "wiki.test.raw", tmp_path / "lambada.jsonl"
    text.write_text(TEXT, "utf-8")
    rows = [
        {"context": "the river ran and", "continuation": "ran"},
        {"text": "about\u2028the stone"},
    ]
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    lambada.write_text("\n".join(lines) + "\n", "utf-8")
    return text, lambada


def scorer(model) -> Scorer:
    return Scorer(Gpt2(model), max_length=CONTEXT, batch_tokens=256)


@torch.no_grad()
def test_token_perplexity_is_transformers_own_loss(gpt2):
    _, model, fast = gpt2
    ids = fast(TEXT)["input_ids"]
    assert len(ids) % CONTEXT > 1 and len(ids) > 3 * CONTEXT
    total = scored = 0
    for start in range(0, len(ids), CONTEXT):
        window = torch.tensor([ids[start : start + CONTEXT]])
        n = window.shape[1] - 1
        total += float(model(window, labels=window).loss) * n
        scored += n
    found, n = calibrate.token_perplexity(scorer(model), ids)
    assert n == scored and found == pytest.approx(math.exp(total / scored), rel=1e-5)
    one_left = ids[: 2 * CONTEXT + 1]
    assert calibrate.token_perplexity(scorer(model), one_left)[1] == 2 * (CONTEXT - 1)


def test_word_perplexity_and_last_words_are_the_stock_adapters(gpt2, files):
    _, model, fast = gpt2
    rows = calibrate.wikitext_rows(files[0])
    pages = calibrate.wikitext_pages(rows)
    assert [page.split()[1] for page in pages] == ["First", "Second"]
    assert " = = Part = = " in pages[0] and "".join(pages).count("@-@") == 1
    stock = HFLM(pretrained=model, tokenizer=fast, backend="causal", max_length=CONTEXT)
    eos = model.config.eos_token_id
    ours = HarnessModel(scorer(model), fast.backend_tokenizer, prefix_token=eos)
    found, words = calibrate.word_perplexity(ours, pages)
    assert words == sum(len(re.split(r"\s+", page)) for page in pages)
    texts = [wikitext_detokenizer({"page": page}) for page in pages]
    assert "well-known" in texts[0] and "1,000" in texts[0]
    nats = 0.0
    for text in texts:  # every token after end-of-text, in the windows of the harness
        ids = [eos, *fast(text)["input_ids"]]
        for end in range(1, len(ids), CONTEXT):
            last = min(end + CONTEXT - 1, len(ids) - 1)
            window = torch.tensor([ids[max(0, last - CONTEXT) : last + 1]])
            with torch.no_grad():
                logprob = model(window[:, :-1]).logits[0].log_softmax(-1)
            picked = logprob.gather(1, window[0, 1:, None])[:, 0]
            nats -= float(picked[len(picked) - (last - end + 1) :].sum())
    assert found == pytest.approx(math.exp(nats / words), rel=1e-4)
    assert stock.max_length == CONTEXT
    accuracy = calibrate.last_words(ours, calibrate.lambada_texts(files[1]))
    context = torch.tensor([fast("the river ran and")["input_ids"]])
    with torch.no_grad():
        first = fast.decode(model(context).logits[0, -1].argmax())
    assert accuracy in ((0.0, 0.5) if first != " ran" else (0.5, 1.0))


def run(folder, files, results, *more) -> int:
    text, lambada = files
    arguments = ["--gpt2", str(folder), "--text", str(text), "--lambada", str(lambada)]
    return main(["eval", "--calibrate", *arguments, "--results", str(results), *more])


def load(results) -> Calibration:
    return Calibration.model_validate_json((results / calibrate.CALIBRATION).read_bytes())


def test_the_command_marks_the_suite(gpt2, files, tmp_path, capsys, monkeypatch):
    assert run(gpt2[0], files, tmp_path) == 0
    printed = capsys.readouterr().out
    found = load(tmp_path)
    assert [row.protocol for row in found.rows] == list(calibrate.PUBLISHED)
    assert not found.calibrated and found.reason.startswith("not calibrated: token_1024 ")
    assert found.reason in printed and "\n" not in found.reason and printed.count("DIFFERS") >= 2
    assert "37.5 in the GPT-2 report" in printed
    # Had these weights the published figures, the suite would be calibrated; or not, once off.
    published = {row.protocol: (row.value + 0.004, 0.01) for row in found.rows}
    monkeypatch.setattr(calibrate, "PUBLISHED", published)
    assert run(gpt2[0], files, tmp_path, "--json") == 0
    assert load(tmp_path).calibrated and load(tmp_path).reason.startswith("calibrated: ")
    assert json.loads(capsys.readouterr().out)["calibrated"] is True
    value, tolerance = published["word_rolling"]
    published["word_rolling"] = (value + 0.02, tolerance)
    assert run(gpt2[0], files, tmp_path) == 0
    assert [row.agrees for row in load(tmp_path).rows] == [True, False, True]
    assert not load(tmp_path).calibrated


def test_without_the_hub_it_says_so_in_one_line(gpt2, files, tmp_path, capsys, monkeypatch):
    def away(*_):
        raise ConnectionError("the hub is away\nfor now")

    monkeypatch.setattr(calibrate, "hub_commit", away)
    assert main(["eval", "--calibrate", "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    told = "not calibrated: openai-community/gpt2: no GPT-2 to load (the hub is away for now)\n"
    assert out.startswith(told) and not load(tmp_path).calibrated and not load(tmp_path).rows
    # The model at hand, its text not: what can be scored is, and the suite is not calibrated.
    arguments = ["--gpt2", str(gpt2[0]), "--lambada", str(files[1]), "--results", str(tmp_path)]
    assert main(["eval", "--calibrate", *arguments]) == 0
    assert [row.protocol for row in load(tmp_path).rows] == ["lambada_openai"]
    assert "hub Salesforce/wikitext: no data (the hub is away for now)" in load(tmp_path).reason


@pytest.mark.parametrize(
    ("text", "lambada", "message"),
    [
        (b"\xff\xfe", b'{"text": "a b"}\n', "wiki.test.raw: not a readable text file"),
        (b" \n \n", b'{"text": "a b"}\n', "wiki.test.raw: holds no text"),
        (None, b'{"text": "a b"}\n{"context": "a"}\n', "lambada.jsonl: passage 2: needs text"),
        (b"once\n", b'{"text": "a b"}\n', "wiki.test.raw: holds no text of two words"),
        (None, b'{"text": "one"}\n', "lambada.jsonl: passage 1: needs text"),
        (None, b'{"text": 5}\n', "lambada.jsonl: passage 1: needs text"),
        (None, b'{"context": "a", "continuation": null}\n', "lambada.jsonl: passage 1: needs text"),
        (None, b"", "lambada.jsonl: holds no passages"),
    ],
)
def test_wrong_files_are_named(gpt2, files, tmp_path, capsys, text, lambada, message):
    if text is not None:
        files[0].write_bytes(text)
    files[1].write_bytes(lambada)
    assert run(gpt2[0], files, tmp_path) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("mol eval: ") and message in error
    assert not (tmp_path / calibrate.CALIBRATION).exists()


def test_a_folder_without_a_gpt2_is_refused(files, tmp_path, capsys):
    assert run(tmp_path, files, tmp_path) == 2
    assert "no GPT-2 to load" in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_with_code_of_its_own_is_refused_without_a_question(
    gpt2, files, tmp_path, capsys, monkeypatch
):
    questions = []
    monkeypatch.setattr("builtins.input", lambda *asked: questions.append(asked) or "n")
    folder = tmp_path / "own"
    folder.mkdir()
    shutil.copy(gpt2[0] / "model.safetensors", folder)
    config = json.loads((gpt2[0] / "config.json").read_text("utf-8"))
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    assert run(folder, files, tmp_path) == 2
    assert "no GPT-2 to load" in capsys.readouterr().err.splitlines()[-1]
    assert not questions


def test_a_gpt2_without_its_tokenizer_is_refused(gpt2, files, tmp_path, capsys):
    """transformers makes an empty one, which reads no text at all."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(gpt2[0] / name, folder)
    assert run(folder, files, tmp_path) == 2
    assert "gpt2: its tokenizer has " in capsys.readouterr().err.splitlines()[-1]


def test_weights_that_are_not_all_there_are_refused(gpt2, files, tmp_path, capsys):
    """transformers draws the missing ones at random, and the suite would seem not calibrated."""
    folder = tmp_path / "gpt2"
    shutil.copytree(gpt2[0], folder)
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.1.ln_1.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert run(folder, files, tmp_path) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "transformer.h.1.ln_1.weight is not among them" in error


def test_its_options_go_with_it(capsys, tmp_path):
    assert main(["eval", "--run", "mol-top3", "--text", "x", "--results", str(tmp_path)]) == 2
    assert "go with --calibrate" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["eval", "--run", "mol-top3", "--calibrate"])
    assert "not allowed with" in capsys.readouterr().err
