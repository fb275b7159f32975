import pytest
from written_items import WRITTEN, write_items, written_tables

from mol.evaluate import item_sources, items


@pytest.fixture(scope="session", autouse=True)
def written_sets_pass():
    """Sets that a test wrote stand in for the pinned ones; all others are judged as ever."""
    real = items.wrong_set

    def judged(key, rows, items_sha256):
        return "" if items_sha256 in WRITTEN else real(key, rows, items_sha256)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "wrong_set", judged)
        assert item_sources.wrong_set is real
        yield


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    return folder, write_items(folder, written_tables())
