"""A paper that does not exist: two tables and two sentences, in a folder of its own.

The engine must audit it without a line of code about it.
"""

import csv
from pathlib import Path

CONDITIONS = """
[recipes.toy]
corpus = "wikitext103"
tokenizer = "bpe"
vocab_size = 1000
layout = { kind = "packed" }
seq_len = 64
optim = { steps = 400, batch_size = 8, lr = 1e-3, warmup_steps = 10 }

[recipes.other]
corpus = "fineweb_edu"
tokenizer = "gpt2"
vocab_size = 50257
layout = { kind = "packed" }
seq_len = 64
optim = { steps = 400, batch_size = 8, lr = 1e-3, warmup_steps = 10 }

[conditions.plain]
label = "Plain"
recipe = "toy"
model = { d_model = 64, n_layers = 1, layer = { kind = "dense", n_heads = 1, d_ff = 64 } }

[conditions.fancy]
label = "Fancy"
recipe = "toy"
model = { d_model = 64, n_layers = 2, layer = { kind = "dense", n_heads = 1, d_ff = 64 } }

[conditions.fancy-web]
label = "Fancy on web text"
recipe = "other"
model = { d_model = 64, n_layers = 2, layer = { kind = "dense", n_heads = 1, d_ff = 64 } }

[conditions.plain-web]
label = "Plain on web text"
recipe = "other"
model = { d_model = 64, n_layers = 1, layer = { kind = "dense", n_heads = 1, d_ff = 64 } }
"""

EXPERIMENTS = """
seeds = [1, 2, 3]

[experiments.X1]
title = "Quality"
paper = "Table 1"
conditions = ["plain", "fancy", "plain-web", "fancy-web"]
three_seeds = ["plain", "fancy"]

[experiments.X2]
title = "Speed"
paper = "Table 2"
benches = ["toy-prefill", "toy-attention"]

[benches.toy-prefill]
program = "prefill"
protocol = { mode = ["eager"], path = ["dense", "loop", "batched"] }
models = ["plain", "fancy"]
smoke = { lengths = [32, 64] }
paper = { lengths = [128, 256], device = "cuda", dtype = "bf16" }

[benches.toy-attention]
program = "attention"
smoke = { d_model = 64, n_heads = 1, d_ff = 64, batch_size = 1, lengths = [32] }
paper = { d_model = 64, n_heads = 1, d_ff = 64, batch_size = 1, lengths = [128] }
"""

COLUMNS = (
    "cell_id", "table", "row", "column", "printed", "spread", "unit", "kind", "n_seeds", "place",
    "experiment", "condition", "seeds", "metric", "labels", "op", "versus", "hardware", "note",
)  # fmt: skip


def cell(cell_id: str, table: str, row: str, column: str, printed: str, **more: str) -> dict:
    """A row of reported.csv; what is not given stays empty."""
    defaults = {"kind": "measured", "unit": "ppl/token", "metric": "ppl", "experiment": "X1"}
    place = f"Table {table}" if table != "text" else "Section 1"
    given = {"cell_id": cell_id, "table": table, "row": row, "column": column, "printed": printed}
    row = dict.fromkeys(COLUMNS, "") | defaults | {"place": place} | given | more
    return row | ({"labels": "split=validation"} if row["metric"] == "ppl" else {})


THREE = {"n_seeds": "3", "seeds": "1;2;3"}
ONE = {"n_seeds": "1", "seeds": "1"}
SPEED = {
    "unit": "token/s", "metric": "prefill_tokens_per_s", "experiment": "X2",
    "condition": "toy-prefill", "n_seeds": "1",
}  # fmt: skip
CELLS = [
    cell("t1-plain-layers", "1", "Plain", "Layers", "1", kind="setting", unit="count", metric=""),
    cell("t1-plain", "1", "Plain", "PPL", "30.00", spread="0.05", condition="plain", **THREE),
    cell("t1-fancy", "1", "Fancy | 2x", "PPL", "27.00", spread="0.05", condition="fancy", **THREE),
    cell("t1-web", "1", "Fancy web", "PPL", "20.00", condition="fancy-web", **ONE),
    cell("t1-plain-web", "1", "Plain web", "PPL", "26.00", condition="plain-web", **ONE),
    cell("t2-128", "2", "128", "Fancy", "10,000", labels="length=128;model=fancy",
         hardware="H200", **SPEED),
    cell("t2-256", "2", "256", "Fancy", "5,000", labels="length=256;model=fancy",
         hardware="RTX 3090", **SPEED),
    cell("t2-unnamed", "2", "256", "Plain", "7,000", labels="length=256;model=plain", **SPEED),
    cell("t2-caption", "2", "caption", "run-to-run variance", "<2%", kind="setting", unit="%",
         metric=""),
    cell("text-gap", "text", "Plain less fancy", "", "3.00", condition="plain", versus="fancy",
         op="diff", **THREE),
    cell("text-cross", "text", "Fancy web crosses", "", "100", condition="fancy-web",
         versus="plain-web", op="crossover", unit="step", **ONE),
]  # fmt: skip


def write_paper(folder: Path, cells: list[dict] | None = None) -> Path:
    """Write the made-up paper's files and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conditions.toml").write_text(CONDITIONS)
    (folder / "experiments.toml").write_text(EXPERIMENTS)
    with open(folder / "reported.csv", "w", newline="") as handle:
        writer = csv.DictWriter(handle, COLUMNS)
        writer.writeheader()
        writer.writerows(CELLS if cells is None else cells)
    return folder
