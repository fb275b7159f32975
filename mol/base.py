"""What every module shares: frozen configuration, user errors, canonical JSON, checked reading,
whole writes and locks that die with their holder."""

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import reprlib
import shutil
import socket
import stat
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mol.known import known_keys, meant

# A part of a file's or folder's name, so it holds no separator and does not begin with a dot.
Slug = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$", max_length=100)]
# A number of layers, steps, tokens and the like: more is a slip, or somebody's test of us.
Size = Annotated[int, Field(gt=0, le=2**40)]
# Where a file lies: any text that the system takes for a name.
FileName = Annotated[str, Field(pattern=r"^[^\x00]+$", max_length=4000)]

LARGEST = 1 << 26  # bytes of a configuration, specification or record


class UserError(ValueError):
    """Bad input. The message is one line: the file, key or value at fault, and the fix."""


class Frozen(BaseModel):
    """Immutable, keyword-only configuration that refuses unknown keys, NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def one_line(error: ValidationError, source: str) -> UserError:
    """First problem of a pydantic error as a UserError that names `source` and the key."""
    problems = error.errors(include_url=False)
    # A misspelled key is also a missing one: what it is spelled like helps more.
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    key = ".".join(str(part) for part in first["loc"]) or "the whole document"
    # A list that holds a wrong value is then too short as well.
    others = [p for p in problems if p["loc"] != first["loc"][: len(p["loc"])]]
    more = f" (and {len(others)} more)" if others else ""
    what = first["msg"].removeprefix("Value error, ")  # pydantic's, before our own words
    got = f", got {shown(first['input'])}"
    if first["type"] == "json_invalid" or isinstance(first["input"], dict):
        got = ""
    elif first["type"] == "extra_forbidden":
        known = known_keys(Frozen, error.title, first["loc"])
        what, got = f"unknown key; {meant(str(first['loc'][-1]), known)}", ""
    return UserError(" ".join(f"{source}: {key}: {what}{got}{more}".split()))


def shown(value: Any) -> str:
    """A value in a message, bounded in depth and length: a few lines of YAML can spell a value of
    terabytes, and Python refuses to write out a number of many thousand digits."""
    try:
        return reprlib.repr(value)[:80]
    except ValueError:
        return "a number of thousands of digits"


def checked(kind: Any, raw: Any, source: Path | str) -> Any:
    """A document that people write, as `kind`: a model or a TypeAdapter. Raises UserError naming
    `source` and the key; text or true where a number belongs is refused, not read as one."""
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    try:
        return adapter.validate_json(json.dumps(raw, default=_unquoted), strict=True)
    except ValidationError as error:
        raise one_line(error, str(source)) from None
    except (TypeError, ValueError) as error:  # of YAML and TOML: dates, endless numbers
        raise UserError(f"{source}: {reason_of(error)}") from None


def _unquoted(value: Any) -> None:
    """For what YAML and TOML make of dates and times, which no key here takes."""
    raise TypeError(f"{value} is a {type(value).__name__}; put it in quotes")


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no white space: equal values give equal strings."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return _CANONICAL.encode(value)


def digest(value: Any, length: int = 8) -> str:
    """First `length` hex digits of the SHA-256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


def regular(path: Path) -> Path:
    """`path`, if it is a file. Raises UserError for what is none: a library that opens a pipe or a
    device waits, or reads, without end."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise UserError(f"{path}: {reason_of(error)}; correct the path") from None
    if stat.S_ISDIR(mode):
        raise UserError(f"{path}: is a folder; name a file")
    if not stat.S_ISREG(mode):
        raise UserError(f"{path}: is a device or a pipe; name a file")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path}: cannot be read; permit it")
    return path


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content as 64 hex digits."""
    with open(regular(path), "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def read_text(path: Path, largest: int = LARGEST) -> str:
    """The text of a small file of ours. OSError, or ValueError for what is none: a device, a pipe
    or a download would be read without end."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError("is no regular file")
    if path.exists() and path.stat().st_size > largest:
        raise ValueError(f"is larger than {largest >> 20} MiB")
    try:
        return path.read_text("utf-8").removeprefix("\ufeff")  # with which some editors begin
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}; convert the file to UTF-8") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file. Raises UserError naming the file."""
    try:
        return tomllib.loads(read_text(path))
    except RecursionError:
        raise UserError(f"{path}: nested too deeply; write it flat") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; correct the path, or write the file") from None
    except (OSError, ValueError) as error:  # what is no UTF-8 or no TOML, or no name of a file
        raise UserError(f"{path}: {reason_of(error)}") from None


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises UserError, naming the file, for what is no JSON: NaN and
    infinity are none, and a key may stand once."""
    try:
        text = read_text(path)
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
        if "\\u" in text:  # only an escape can spell half a surrogate pair, which is no text
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except RecursionError:
        raise UserError(f"{path}: nested too deeply to be one of ours") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; correct the path") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {reason_of(error)}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def reason_of(error: Exception) -> str:
    """What an error says, in one line; of the system's errors, without their number."""
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__


def visible(message: str) -> str:
    """One line of at most 2,000 printable characters, whatever names and values it quotes."""
    return printable(" ".join(message.split())[:2000])


def printable(text: str) -> str:
    """The text with what would steer a terminal, or turn its reading direction, as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@contextlib.contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A path beside `target` to write to. At the end it is synced and takes `target`'s place; a
    writer that fails or is killed leaves `target` as it was. UserError where the disk refuses, or
    where `target` is a folder."""
    target = Path(target)
    _check_no_folder(target)
    with _beside(target, tempfile.mkstemp) as part:
        yield part
        with open(part, "rb+") as stream:
            os.fsync(stream.fileno())
        os.chmod(part, 0o644)
        os.replace(part, target)


def check_writable(target: Path) -> None:
    """Raises UserError where `whole` would: for a caller with much to do before it writes."""
    _check_no_folder(target)
    with scratch(target):
        pass


def _check_no_folder(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        raise UserError(f"{target}: is a folder; name a file")


def scratch(target: Path) -> contextlib.AbstractContextManager[Path]:
    """A folder beside `target` to build it in, removed at the end. UserError where the disk
    refuses."""
    return _beside(Path(target), lambda **where: (None, tempfile.mkdtemp(**where)))


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `content` to a temporary file beside `path`, sync, then rename: whole or absent."""
    with whole(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def _beside(target: Path, make: Callable[..., tuple[int | None, str]]) -> Iterator[Path]:
    """What `make` makes, locked while its maker lives. What killed makers left is removed."""
    if target.exists() and not (target.is_file() or target.is_dir() or target.is_symlink()):
        # A rename would put a file in the place of /dev/null.
        raise UserError(f"{target}: is a device or a pipe; name a file or folder of its own")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Named as tempfile names them: an editor's .record.json.swp is not ours.
        for remains in target.parent.glob(f".{glob.escape(target.name)}.{'[a-z0-9_]' * 8}"):
            with contextlib.suppress(OSError):
                handle = os.open(remains, os.O_RDONLY | os.O_NONBLOCK)
                if _lock(handle):
                    _remove(remains)
                os.close(handle)
        linked = False
        while not linked:
            handle, name = make(dir=target.parent, prefix=f".{target.name}.")
            handle = os.open(name, os.O_RDONLY) if handle is None else handle
            _lock(handle)
            linked = os.fstat(handle).st_nlink > 0  # else taken for remains before it was locked
        try:
            yield Path(name)
        finally:
            _remove(Path(name))
            os.close(handle)
    except Exception as error:
        # Tokenizers and safetensors tell of a full disk by exceptions of their own.
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        no_folder = isinstance(error, FileExistsError)  # where one is to be made
        reason = "a part of its path is a file" if no_folder else reason_of(error)
        raise UserError(
            f"{target}: cannot be written ({reason}); what was there is kept. Free space "
            "or permit writing, then give the same command again"
        ) from None


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)


def _lock(handle: int) -> bool | None:
    """Lock an open file until it is closed, which the kernel does when its holder dies: a lock is
    never stale. False where another process holds it, None where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextlib.contextmanager
def alone(lock: Path, what: str, wait: float = 0.0) -> Iterator[None]:
    """Hold the file `lock`, after at most `wait` seconds; UserError names who else does `what`."""
    deadline = time.monotonic() + wait
    while True:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            # Without a buffer, whose content a full disk would refuse once more on closing.
            stream = open(lock, "ab+", buffering=0)  # noqa: SIM115, closed below
        except OSError as error:
            raise UserError(f"{lock}: cannot be written ({reason_of(error)}); permit it") from None
        with stream:
            mine = _lock(stream.fileno())
            if mine is not False and os.fstat(stream.fileno()).st_nlink:
                with contextlib.suppress(OSError):  # a full disk takes no name, and needs none
                    stream.truncate(0)
                    stream.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
                try:
                    yield
                finally:
                    lock.unlink(missing_ok=True)
                return
            if mine is False and time.monotonic() > deadline:
                stream.seek(0)
                raise UserError(
                    f"{lock.parent}: {stream.read(200).decode() or 'another process'} {what}; "
                    "wait until it ends, or end it"
                )
        time.sleep(0.05)
