"""Users' files: their kind and size are checked before a byte is read, JSON is read strictly, and none is half written.

No read blocks (a FIFO, a device) or is of more than its limit. Every problem of one is an `Unreadable`, whose text
follows the file's name in a sentence: `f"{path} {error}; {error.mend}"`.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

MIB = 1 << 20
_CHUNK = MIB
_DIGITS = 100  # of an integer; transformers writes 1e30 for "no bound"
_LONGEST_NUMBER = 400  # characters of any other number
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Unreadable(ValueError):
    """A file that is not read; the text is a predicate, such as "does not exist", and `mend` says what to do."""

    def __init__(self, predicate: str, mend: str) -> None:
        super().__init__(predicate)
        self.mend = mend


def require_file(path: str | os.PathLike[str], limit: int | None = None) -> int:
    """The size in bytes of a regular file, links followed; raises Unreadable for anything else, or above `limit`."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise _unreadable(error) from None
    _check(status, limit)
    return status.st_size


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes; raises Unreadable otherwise."""
    require_file(path, limit)
    try:
        # Should another file have taken its place since, opening and reading that do not wait either.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        with open(descriptor, "rb", buffering=0) as file:
            _check(os.fstat(descriptor), limit)
            content = bytearray()
            while part := file.read(min(_CHUNK, limit + 1 - len(content))):
                content += part
    except OSError as error:
        raise _unreadable(error) from None
    if len(content) > limit:  # files of /proc have no size
        raise _too_large(len(content), limit)
    return bytes(content)


def read_json(path: str | os.PathLike[str], limit: int) -> Any:
    """The value of a JSON file in UTF-8 of at most `limit` bytes; raises Unreadable otherwise.

    Refused, though Python would read them: a byte-order mark, NaN and Infinity, integers of more than 100 digits, and
    one key twice with different values.
    """
    content = read_bytes(path, limit)
    try:
        text = content.decode("utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("it begins with a byte-order mark")
        return _DECODER.decode(text)
    except UnicodeDecodeError as error:
        reason = f"not a text file: byte {error.start} is not UTF-8"
    except RecursionError:
        reason = "nested too deeply"
    except json.JSONDecodeError as error:
        reason = f"{error}, perhaps cut short"
    except ValueError as error:
        reason = str(error)
    raise Unreadable(f"is not valid JSON ({reason})", "fetch or write it again") from None


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Replaces the file as a whole: a reader never sees half of it. Raises ValueError where it cannot be written."""
    place = Path(os.path.realpath(path))  # through links: the file is replaced, not the link to it
    temporary = place.parent / f".{os.urandom(8).hex()}.tmp"
    try:
        if place.exists() and not place.is_file():  # a rename would put a file in the place of a device
            raise ValueError(f"{path} is not a regular file; name a file to write.")
        temporary.write_bytes(data)
        os.replace(temporary, place)
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}); name a file in a writable directory.") from None
    finally:
        with contextlib.suppress(OSError):  # never written, or gone after the rename
            temporary.unlink()


def shortened(text: object, length: int = 80) -> str:
    """`text` on one line of printable characters, cut to `length`: names in files may hold a terminal's commands."""
    line = " ".join(str(text)[: 4 * length].split())
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
    return line if len(line) <= length else line[: length - 1] + "…"


def is_name_in_directory(name: object, suffix: str = "") -> bool:
    """True where `name`, as a file gives it, is a plain file name that leads nowhere but into the file's directory."""
    if not isinstance(name, str) or not name.endswith(suffix) or not name.isprintable():
        return False
    return Path(name).name == name and len(name.encode()) <= 255 and "\\" not in name


def _check(status: os.stat_result, limit: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise Unreadable(f"cannot be read (it is {kind}, not a regular file)", "put the file in its place")
    if limit is not None and status.st_size > limit:
        raise _too_large(status.st_size, limit)


def _too_large(size: int, limit: int) -> Unreadable:
    return Unreadable(
        f"cannot be read (it has {size:,} bytes, and such files are read up to {limit:,})", "fetch the right file"
    )


def _unreadable(error: OSError | ValueError) -> Unreadable:
    if isinstance(error, FileNotFoundError):
        return Unreadable("does not exist", "fetch or write it")
    if isinstance(error, OSError):
        return Unreadable(f"cannot be read ({error.strerror})", "check its name and permissions")
    return Unreadable("cannot be read (no file can have that name)", "correct the name")  # NUL, lone surrogates


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _number(digits: str) -> float:
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"a number of {len(digits)} characters")
    return float(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        for key, value in pairs:
            if values[key] != value:
                raise ValueError(f"the key {shortened(repr(key), 40)} stands there twice, with different values")
    return values


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_refuse_constant, parse_int=_integer, parse_float=_number
)
