"""The model card: what was trained, how it measured, where it came from, how to load it."""

from collections.abc import Iterable
from importlib.metadata import version

from mol.data.meta import CorpusMeta
from mol.export.checkpoint import Checkpoint
from mol.store.record import Metric, Record

PAPER = "Mixture of Layers with Hybrid Attention"
URL = "https://arxiv.org/abs/2605.09516"


def card(checkpoint: Checkpoint, parameters: int) -> str:
    """README.md of an export, in the hub's form."""
    record = checkpoint.record
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n"
        "tags:\n- mixture-of-layers\n- text-generation\n---",
        f"# {checkpoint.run_id}",
        f"A decoder-only language model of {parameters:,} parameters, trained by the reproduction "
        f"suite `mol` of [*{PAPER}*]({URL}). The suite and this model are not the authors'.",
        _loading(checkpoint.meta),
        _record(record) if record else "## Record\n\nNone: these are weights without their run.",
        _data(checkpoint.meta, record),
        _limits(checkpoint.meta, record),
        "## License\n\nThe code is under the MIT license. The training text is under: "
        f"{_license(checkpoint.meta, record)}. Whether its terms reach a model trained on it is "
        "for you to judge.",
    ]
    if record:
        body = record.model_dump_json(indent=1)
        parts.append(f"## The record in full\n\n```json\n{body}\n```")
    return "\n\n".join(parts) + "\n"


def _loading(meta: CorpusMeta) -> str:
    return f"""## How to load

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its name on a hub
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
batch = tokenizer(["The river"], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**batch, max_new_tokens=40)))
```

Written with torch {version("torch")}, transformers {version("transformers")} and pydantic
{version("pydantic")}; `mol` need not be installed. `trust_remote_code=True` runs the Python files
of this folder, and nothing else here is code: the weights are safetensors. Where `mol` is
installed, `import mol.export` registers the classes and the flag can be left out.

Batches are padded on the left, with an attention mask (the tokenizer does both). Text that spells
a special token is read as text; end-of-text has id {meta.eos_id}."""


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *escaped]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _metric(metric: Metric) -> list[str]:
    protocol = metric.protocol.model_dump() if metric.protocol else {}
    how = ", ".join(f"{name} {value}" for name, value in (protocol | metric.labels).items())
    error = "" if metric.stderr is None else f"{metric.stderr:.4g}"
    n = "" if metric.n is None else f"{metric.n:,}"
    whole = metric.unit in ("count", "byte")
    value = f"{metric.value:,.0f}" if whole else f"{metric.value:.6g}"
    return [metric.name, value, error, n, metric.unit, how]


def _record(record: Record) -> str:
    spec, source, on = record.spec, record.provenance, record.hardware
    facts = [
        ["condition", f"{spec.condition}, seed {spec.seed}, scale `{spec.scale}`"],
        ["training", f"{spec.optim.steps:,} steps of {spec.optim.batch_size} sequences of "
                     f"{spec.seq_len} tokens, {spec.precision}"],
        ["hardware", f"{on.count} x {on.name} ({on.device}), {on.memory_gib} GiB, "
                     f"{on.threads} threads"],
        ["date", f"{record.finished:%Y-%m-%d %H:%M} UTC, {record.wall_s:,.0f} s"],
        ["commit", f"{source.git_commit or 'not recorded'}"
                   f"{' with uncommitted changes' if source.dirty else ''}"],
        ["code", f"sha256 {source.code_sha256}"],
        ["command", f"`{source.command}`"],
        ["versions", ", ".join(f"{name} {v}" for name, v in source.versions.items())],
        *(["note", note] for note in record.notes),
    ]  # fmt: skip
    head = ["metric", "value", "± stderr", "n", "unit", "protocol"]
    return "\n\n".join(
        [
            f"## Record of run `{record.run_id}`",
            _table(["", ""], facts),
            "Two perplexities compare only where their protocols are equal.",
            _table(head, map(_metric, record.metrics)),
        ]
    )


def _license(meta: CorpusMeta, record: Record | None) -> str:
    """As the run recorded it, or as the corpus has it where there is no record of it."""
    return (record.provenance.data if record else {}).get("license", meta.source.license)


def _data(meta: CorpusMeta, record: Record | None) -> str:
    train = meta.splits["train"]
    facts = [
        ["corpus", f"{meta.spec.corpus}, from {meta.source.name}"],
        ["note", meta.source.note],
        ["license", _license(meta, record)],
        ["training split", f"{train.real_tokens:,} tokens, {train.words:,} words"],
        ["tokenizer", f"{meta.spec.tokenizer}, {meta.vocab_size:,} tokens, "
                      f"sha256 {meta.tokenizer_sha256}"],
        ["source", f"sha256 {meta.source.sha256}"],
    ]  # fmt: skip
    known = {"corpus", "source", "license", "tokenizer_sha256", "source_sha256"}
    pins = record.provenance.data.items() if record else ()
    facts += [[name, value] for name, value in pins if name not in known]
    return f"## Data\n\n{_table(['', ''], facts)}"


def _limits(meta: CorpusMeta, record: Record | None) -> str:
    lines = [
        "Intended for research on this architecture: to check the suite's figures and to compare "
        "models trained alike. It is a base model: it continues text and was never tuned to follow "
        "instructions or to be safe, and what it writes can be false or offensive.",
        f"It knows the text it was trained on ({meta.source.name}) and no other language or "
        "domain.",
    ]
    if record:
        lines.append(
            f"It was trained on sequences of {record.spec.seq_len} tokens. Nothing refuses longer "
            "ones, whose quality is not measured here."
        )
        if record.spec.scale != "paper":
            lines.append(
                f"Scale `{record.spec.scale}` is not the paper's: its figures reproduce none of "
                "the paper's numbers."
            )
    if meta.pad_id is None:
        lines.append("No padding token occurred in training; padding must be masked.")
    return "## Intended use and limits\n\n" + "\n\n".join(lines)
