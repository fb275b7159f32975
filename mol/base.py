"""What every module shares: frozen configuration, user errors, canonical JSON, atomic writes."""

import hashlib
import json
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class UserError(ValueError):
    """Bad input. The message is one line: the file, key or value at fault, and the fix."""


class Frozen(BaseModel):
    """Immutable, keyword-only configuration that refuses unknown keys, NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def one_line(error: ValidationError, source: str) -> UserError:
    """First problem of a pydantic error as a UserError that names `source` and the key."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"]) or "the whole document"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    got = "" if first["type"] == "json_invalid" else f", got {str(first['input'])[:80]!r}"
    message = f"{source}: {key}: {first['msg']}{got}{more}"
    return UserError(" ".join(message.split()))


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no white space: equal values give equal strings."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any, length: int = 8) -> str:
    """First `length` hex digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content as 64 hex digits."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file. Raises UserError naming the file."""
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `content` to a temporary file beside `path`, sync, then rename: whole or absent."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
