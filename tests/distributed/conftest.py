"""A tiny corpus and a tiny model of it, trained by one process."""

from types import SimpleNamespace

import pytest
from places import Place
from processes import call
from ranks import train
from tiny_corpus import tiny_corpus


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    data = tiny_corpus(folder)
    return SimpleNamespace(data=data, corpus=folder / "corpus")


@pytest.fixture(scope="session")
def alone(text, tmp_path_factory):
    """Curve, weights and record of a specification that one process trained."""
    found = {}

    def trained(spec):
        if spec.run_id not in found:
            place = Place(tmp_path_factory.mktemp("alone"), text, spec)
            done = call(place.results, train, place.argv(), 10**9)
            assert done.code == 0, done.err
            found[spec.run_id] = place
        return found[spec.run_id]

    return trained
