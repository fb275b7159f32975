import pytest
from written_items import write_items, written_tables


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    return folder, write_items(folder, written_tables())
