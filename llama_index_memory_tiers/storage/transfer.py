"""The export file: JSON Lines with a header, a line per row, and a last line that proves the file whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from llama_index_memory_tiers.display import Grid, Shown
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.storage import codec
from llama_index_memory_tiers.storage.addresses import nameable

FORMAT = "llama-index-memory-tiers"
FILE_VERSION = 1
KINDS = ("session", "message", "cursor", "dead", "record")

Progress = Callable[[int, int], None]
"""Gets the lines done and the lines in all; may be called from another thread."""
Target = str | os.PathLike[str] | BinaryIO
"""A file path, or a stream of bytes."""


@dataclass(frozen=True, slots=True)
class TransferReport(Shown):
    """What an export or import moved.

    Args:
        sessions: How many sessions.
        messages: How many messages, forgotten ones among them.
        records: How many records.
        skipped: Sessions of an import that were there already, word for word.
    """

    sessions: int = 0
    messages: int = 0
    records: int = 0
    skipped: int = 0

    def _grids(self) -> Sequence[Grid]:
        heads = ("sessions", "messages", "records", "sessions that were there")
        return [Grid(heads, [(self.sessions, self.messages, self.records, self.skipped)])]


class LineWriter:
    """Writes lines and remembers what a reader needs to know that none is missing.

    Args:
        file: Open for writing bytes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.blake2b(digest_size=16)
        self.counts = dict.fromkeys(KINDS, 0)

    def header(self, user_id: str) -> None:
        """Begin the file."""
        self._write({"format": FORMAT, "version": FILE_VERSION, "user_id": user_id or None})

    def row(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write one row."""
        self._write({kind: fields})
        self.counts[kind] += 1

    def end(self) -> None:
        """End the file."""
        self._write({"end": self.counts, "digest": self._digest.hexdigest()})

    def _write(self, fields: Mapping[str, Any]) -> None:
        line = codec.to_json(fields).encode() + b"\n"
        self._file.write(line)
        self._digest.update(line)


@contextmanager
def writing(target: Target) -> Iterator[BinaryIO]:
    """Open a place for an export; what stands at a path is replaced in one step, when all is written.

    Args:
        target: Where it shall be in the end.

    Yields:
        A file, seekable, so that it can be begun anew.

    Raises:
        ConfigurationError: It is neither a path in a folder that exists nor a stream.
    """
    if isinstance(target, str | os.PathLike):
        path = _path("target", target)
        if path.is_dir() or path.is_socket():
            raise _no_place("target", target)
        if path.exists() and not path.is_file():  # a device or a pipe: to be written to, never to be replaced
            with path.open("wb") as stream, writing(stream) as file:
                yield file
            return
        path = Path(os.path.realpath(path))  # a link stays, what it points to is replaced
        if path.is_symlink() or not path.parent.is_dir():  # links in a circle lead to a link
            raise _no_place("target", target)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".export.", delete=False) as file:
            made = Path(file.name)
            try:
                yield file  # type: ignore[misc]  # a wrapper with the methods of BinaryIO
                file.flush()
                os.fsync(file.fileno())
                made.replace(path)
            finally:
                made.unlink(missing_ok=True)
        return
    _check_stream("target", target, "write", "writable")
    with tempfile.TemporaryFile() as file:
        yield file
        file.seek(0)
        shutil.copyfileobj(file, target)


@contextmanager
def reading(source: Target) -> Iterator[BinaryIO]:
    """Open an export for reading it twice; a stream is copied to a temporary file first.

    Args:
        source: Where it is.

    Yields:
        A file, seekable.

    Raises:
        ConfigurationError: There is none.
    """
    if isinstance(source, str | os.PathLike):
        path = _path("source", source)
        if not path.is_file():
            raise _no_place("source", source)
        with path.open("rb") as file:
            yield file
        return
    _check_stream("source", source, "read", "readable")
    with tempfile.TemporaryFile() as file:
        shutil.copyfileobj(source, file)
        file.seek(0)
        yield file


def _path(name: str, given: str | os.PathLike[str]) -> Path:
    try:
        path = Path(given).expanduser()
    except (TypeError, RuntimeError):  # a path of bytes; the home of nobody
        raise _no_place(name, given) from None
    if not nameable(path):
        raise _no_place(name, given)
    return path


def _check_stream(name: str, stream: object, method: str, able: str) -> None:
    """Refuse what no bytes can be written to, or read from: a stream of text has an encoding."""
    if callable(getattr(stream, method, None)) and not hasattr(stream, "encoding"):
        ready = getattr(stream, able, None)
        with suppress(ValueError):  # it is closed
            if not getattr(stream, "closed", False) and (not callable(ready) or ready()):
                return
    raise _no_place(name, stream)


def _no_place(name: str, given: object) -> ConfigurationError:
    shown = os.fspath(given) if isinstance(given, os.PathLike) else given
    place = "a file that exists" if name == "source" else "a file in a folder that exists"
    return ConfigurationError(
        f"{name}={shown!r:.300} was given.",
        allowed=f"{name} is the path of {place}, or an open stream of bytes.",
        remedy="Correct the path." if name == "source" else "Create the folder, or correct the path.",
    )


def check_file(file: BinaryIO, user_id: str) -> dict[str, int]:
    """Read an export from beginning to end before anything is stored.

    Args:
        file: At its beginning.
        user_id: Whose it has to be, or ''.

    Returns:
        How many rows of each kind it holds.

    Raises:
        ConfigurationError: It is no export, of a newer version, of somebody else, or not whole.
    """
    digest = hashlib.blake2b(digest_size=16)
    counts = dict.fromkeys(KINDS, 0)
    for number, line in enumerate(file):
        fields = _parsed(line, number)
        if number == 0:
            _check_header(fields, user_id)
        elif "end" in fields:
            if fields != {"end": counts, "digest": digest.hexdigest()} or file.read(1):
                raise damaged(f"its last line does not fit the {number} lines before")
            return counts
        else:
            kind = next(iter(fields), "")
            if kind not in counts or len(fields) != 1:
                raise damaged(f"line {number + 1} is of an unknown kind")
            counts[kind] += 1
        digest.update(line)
    raise damaged("its last line is missing")


def rows_of(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Rows of a file that `check_file` has passed, with their kinds."""
    file.seek(0)
    next(file)
    for line in file:
        [(kind, fields), *more] = json.loads(line).items()
        if more:
            return
        yield kind, fields


def _parsed(line: bytes, number: int) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or not line.endswith(b"\n"):
        raise damaged(f"line {number + 1} cannot be read")
    return fields


def _check_header(header: Mapping[str, Any], user_id: str) -> None:
    if header.get("format") != FORMAT:
        raise damaged("its first line is not the header of an export")
    if header.get("version") != FILE_VERSION:
        raise ConfigurationError(
            f"An export of version {header.get('version')!r:.20} was given.",
            allowed=f"This release reads version {FILE_VERSION}.",
            remedy="Install the newer llama-index-memory-tiers that wrote it; nothing was stored.",
        )
    if (header.get("user_id") or "") != user_id:
        raise ConfigurationError(
            "An export of another user was given.",
            allowed="A memory takes in what its own user_id has said.",
            remedy="Make the memory with the user_id of the export; nothing was stored.",
        )


def damaged(why: str) -> ConfigurationError:
    """The error for a file that is not what `aexport` wrote."""
    return ConfigurationError(
        f"An export was given, but {why}.",
        allowed="An export is read as it was written, whole and unchanged.",
        remedy="Export again or copy the file again; nothing was stored.",
    )
