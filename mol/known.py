"""Which word was meant: the nearest of those that a place knows."""

import difflib
import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel


def meant(word: str, known: Iterable[str]) -> str:
    """What to say to who wrote `word`: the nearest of `known`, else all of them."""
    known = sorted(known)
    return nearest(word, known) or (f"known are {', '.join(known)}" if known else "leave it out")


def nearest(word: str, known: Iterable[str]) -> str:
    """A question after the nearest of `known`; empty where none is near."""
    found = difflib.get_close_matches(word[:200], list(known), 1)
    return f"did you mean {found[0]!r}?" if found else ""


def known_keys(base: type[BaseModel], title: str, loc: tuple[int | str, ...]) -> set[str]:
    """Keys of the configuration at a pydantic error's `loc`, below the models that its title names;
    all of them are subclasses of `base`."""
    words = set(re.findall(r"\w+", title))
    places = [model for model in _subclasses(base) if model.__name__ in words]
    for part in loc[:-1]:
        inner = [m for place in places for m in _below(place, part)]
        tagged = [place for place in places if _is_tagged(place, part)]
        places = inner or tagged or places  # else an index, or a key of a mapping
    return {name for place in places for name in place.model_fields}


def _subclasses(base: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in base.__subclasses__():
        yield model
        yield from _subclasses(model)


def _below(place: type[BaseModel], key: int | str) -> Iterator[type[BaseModel]]:
    if key in place.model_fields:
        yield from _models(place.model_fields[key].annotation)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _is_tagged(place: type[BaseModel], tag: int | str) -> bool:
    """Whether the model is the one of a union that this word chooses, such as kind = "file"."""
    return any(tag in get_args(field.annotation) for field in place.model_fields.values())
