"""The hub under its real names, with `datasets` reading local files in its place."""

import datasets
import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from mol.base import UserError
from mol.data.config import DataSpec, HubSource
from mol.data.hub import HUB, open_hub
from mol.data.packing import prepare


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Calls of load_dataset; rows come from a local parquet file for each split."""
    calls = []
    files = {}
    for split in ("train", "validation", "test"):
        rows = [{"id": i, "text": f" The {split} document {i} @,@ 000 . \n"} for i in range(400)]
        files[split] = str(tmp_path / f"{split}.parquet")
        datasets.Dataset.from_list(rows).to_parquet(files[split])

    def load(path, name, *, split, streaming, revision):
        calls.append((path, name, split, streaming, revision))
        return original("parquet", data_files=files, split=split, streaming=streaming)

    original = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    info = type("Info", (), {"sha": "c0ffee"})
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name: info)
    return calls


def test_names_are_the_published_ones():
    assert {(n.repository, n.configuration) for n in HUB.values()} == {
        ("Salesforce/wikitext", "wikitext-103-raw-v1"),
        ("HuggingFaceTB/smollm-corpus", "cosmopedia-v2"),
        ("HuggingFaceFW/fineweb-edu", "sample-100BT"),
    }


def test_streamed_corpora_hold_out_by_hash(hub):
    text = open_hub("cosmopedia_v2", HubSource())
    parts = [[*text.documents(split)] for split in ("train", "validation", "test")]
    assert len(sum(parts, [])) == len(set(sum(parts, []))) == 400
    assert len(parts[0]) > 370 and parts[1] and parts[2]
    assert set(hub) == {("HuggingFaceTB/smollm-corpus", "cosmopedia-v2", "train", True, "c0ffee")}
    assert text.info.files == {"HuggingFaceTB/smollm-corpus/cosmopedia-v2": "c0ffee"}
    few = open_hub("fineweb_edu", HubSource(max_documents=50))
    assert sum(len([*few.documents(split)]) for split in ("train", "validation", "test")) == 50


def test_wikitext_has_its_own_splits_and_is_made_plain(hub, tmp_path):
    spec = DataSpec(
        corpus="wikitext103",
        source=HubSource(),
        tokenizer="bpe",
        vocab_size=280,
        layout={"kind": "padded", "chunk": 16, "min_chunk": 4},
    )
    meta = prepare(spec, tmp_path / "corpus")
    assert {call[2] for call in hub} == {"train", "validation", "test"}
    assert meta.source.license == "CC BY-SA 3.0"
    size = sum(len(f"The validation document {i},000.") for i in range(400))
    assert 0 < meta.splits["validation"].bytes <= size


def test_no_network_is_one_clear_line(monkeypatch, tmp_path):
    def unreachable(self, name):
        raise RuntimeError("Name or service not known\nand more")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreachable)
    with pytest.raises(UserError) as error:
        open_hub("fineweb_edu", HubSource())
    message = str(error.value)
    assert "hub HuggingFaceFW/fineweb-edu: Name or service not known; check the network" in message
    assert "\n" not in message


def test_offline_uses_the_cache_and_says_so(hub, monkeypatch):
    def offline(self, name):
        raise OfflineModeIsEnabled("offline")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    text = open_hub("wikitext103", HubSource(max_documents=3))
    assert len([*text.documents("test")]) == 3
    assert hub[-1][-1] is None
    assert "offline" in text.info.files["Salesforce/wikitext/wikitext-103-raw-v1"]


def test_a_stream_that_breaks_is_one_clear_line(hub, monkeypatch):
    class Broken:
        def select_columns(self, names):
            return self

        def __iter__(self):
            yield {"text": "first"}
            raise ConnectionError("reset by peer")

    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: Broken())
    with pytest.raises(UserError, match="hub Salesforce/wikitext: reset by peer"):
        [*open_hub("wikitext103", HubSource()).documents("train")]
