"""The paper's corpora under their own names on the Hugging Face hub (4.1)."""

from collections.abc import Iterator
from dataclasses import dataclass

from mol.base import UserError, digest
from mol.data.config import Corpus, HubSource
from mol.data.meta import SourceInfo, Split
from mol.data.sources import Text, side

PER_MILLE = 10  # of the documents of the corpora that come without splits
UNKNOWN = "commit not known (offline, from the cache)"


@dataclass(frozen=True)
class HubName:
    """`streaming`: too large to download whole, and published as one training split."""

    repository: str
    configuration: str
    streaming: bool
    license: str


HUB = {
    "wikitext103": HubName("Salesforce/wikitext", "wikitext-103-raw-v1", False, "CC BY-SA 3.0"),
    "cosmopedia_v2": HubName("HuggingFaceTB/smollm-corpus", "cosmopedia-v2", True, "ODC-By 1.0"),
    "fineweb_edu": HubName("HuggingFaceFW/fineweb-edu", "sample-100BT", True, "ODC-By 1.0"),
}


def open_hub(corpus: Corpus, source: HubSource) -> Text:
    """The corpus at the commit that is current now; the commit is recorded. WikiText-103 has its
    own splits; the other two hold out documents by a hash of their text. `max_documents` rows
    are read at most, of each split or of the stream before holding out."""
    name = HUB[corpus]
    commit = _commit(name)

    def documents(split: Split) -> Iterator[str]:
        published = "train" if name.streaming else split
        for text in _rows(name, commit, published, source.max_documents):
            if text.strip() and (not name.streaming or side(text, PER_MILLE) == split):
                yield text

    files = {f"{name.repository}/{name.configuration}": commit or UNKNOWN}
    info = SourceInfo(
        name=f"{name.repository}, {name.configuration}",
        files=files,
        sha256=digest(files, 64),
        license=name.license,
        note="the corpus the paper names",
    )
    return Text(info, documents)


def _commit(name: HubName) -> str | None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        return HfApi().dataset_info(name.repository).sha
    except OfflineModeIsEnabled:
        return None  # the user asked for the cache
    except Exception as error:  # each release of the client raises other types
        raise _failed(name, error) from None


def _rows(name: HubName, commit: str | None, split: str, most: int | None) -> Iterator[str]:
    import datasets

    try:
        rows = datasets.load_dataset(
            name.repository,
            name.configuration,
            split=split,
            streaming=name.streaming,
            revision=commit,
        ).select_columns(["text"])
        if most is not None:
            rows = rows.take(most)
        for row in rows:
            yield row["text"]
    except Exception as error:
        raise _failed(name, error) from None


def _failed(name: HubName, error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(
        f"hub {name.repository}: {reason}; check the network and HF_TOKEN, or use the source "
        '{"kind": "wheel"} or {"kind": "file"}'
    )
