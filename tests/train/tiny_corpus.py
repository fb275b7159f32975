"""A tiny prepared corpus and a split layer that trains in a second, for every test of training."""

from pathlib import Path

from mol.data.config import DataSpec, FileSource, PaddedLayout
from mol.data.packing import prepare
from mol.model.config import SplitLayer

LAYER = SplitLayer(
    d_thin=16, n_heads=2, n_blocks=4, n_shared=1, top_k=2, attention="deltanet", d_ff=32
)


def tiny_corpus(folder: Path) -> DataSpec:
    """The corpus of a made-up text, prepared in `folder / "corpus"`."""
    words = [f"w{i * i % 97} x{i % 13} y{i % 7}" for i in range(6000)]
    paragraphs = [" ".join(words[i : i + 3 + i % 11]) for i in range(0, 6000, 15)]
    (folder / "text.txt").write_text("\n\n".join(paragraphs))
    data = DataSpec(
        corpus="wikitext103",
        source=FileSource(train=str(folder / "text.txt")),
        tokenizer="bpe",
        vocab_size=300,
        layout=PaddedLayout(chunk=16, min_chunk=8),
    )
    prepare(data, folder / "corpus")
    return data
