"""Files that people edit as well: one folder per owner, replaced as a whole, appended in one piece."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.records import Scope
from llama_index_memory_tiers.text import folded

try:
    import fcntl
except ImportError:  # Windows: threads of this process wait for each other, other processes do not
    fcntl = None  # type: ignore[assignment]

MEMORY_FILE = "MEMORY.md"

# Beside the owners' folders: one that is erased takes no lock along that somebody waits for. Shared by some owners, so
# that their names say nothing of who was here.
_LOCKS = ".locks"
_OLD_LOCK_FILE = ".lock"  # earlier versions had it in the owner's folder
_NAME_CHARS = 32
_DAY = re.compile(r"(\d{4}-\d{2}-\d{2})(?:\.(\d{1,6}))?\.md")
_THREADS = threading.Lock()


def folder_name(scope: Scope, *, per_session: bool = False) -> str:
    """Name of an owner's folder.

    Args:
        scope: Whose.
        per_session: One for each session even though there is a user.

    Returns:
        A few letters of the id for people, and a hash of all of it: harmless on every file system, never reserved,
        never too long, and different for ids that differ in case alone.
    """
    user = scope.user_id
    parts = ("s", user or "", scope.session_id) if user is None or per_session else ("u", user)
    digest = hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()[:20]
    readable = re.sub(r"[^a-z0-9]+", "-", parts[-1].lower()).strip("-")[:_NAME_CHARS].strip("-")
    return "-".join(part for part in (parts[0], readable, digest) if part)


class OwnerFiles:
    """One owner's files; every method works on the disk and belongs in a thread.

    Args:
        folder: Where; made when something is written.
        max_bytes: Bound of each file, in bytes.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes

    def memory(self) -> str:
        """The text of `MEMORY.md`; '' when there is none."""
        return self._read(self.folder / MEMORY_FILE)

    def change_memory(self, change: Callable[[str], str]) -> bool:
        """Replace `MEMORY.md` as a whole: whoever reads it, or a crash, finds the old text or the new one.

        Args:
            change: The text as it is → the text as it is to be.

        Returns:
            Whether it is another one.

        Raises:
            ConfigurationError: The file would be larger than its bound.
        """
        path = self.folder / MEMORY_FILE
        with self._writing():
            while True:
                seen = _stamp(path)
                old = self._read(path)
                new = change(old)
                if new == old:
                    return False
                data = new.encode("utf-8", "surrogateescape")
                if len(data) > self._max_bytes and len(data) > len(old.encode("utf-8", "surrogateescape")):
                    raise ConfigurationError(
                        f"{MEMORY_FILE} would take {len(data)} bytes.",
                        allowed=f"max_file_bytes={self._max_bytes} are allowed.",
                        remedy="Remove what is out of date, write it shorter, or raise max_file_bytes.",
                    )
                if _replace(path, data, seen):
                    return True

    def append(self, day: date, entry: str) -> Path:
        """Append an entry to the day's file, in one piece; a full file is followed by `<day>.2.md` and so on.

        Args:
            day: Which day.
            entry: With a newline at its end; one that is larger than a whole file is cut.

        Returns:
            The file.
        """
        data = entry.encode("utf-8", "surrogateescape")
        if len(data) > self._max_bytes:
            data = data[: self._max_bytes - 5].decode("utf-8", "ignore").encode() + "…\n".encode()
        with self._writing():
            number = max((n for d, n, _ in self.days() if d == day), default=1)
            path = self._day_file(day, number)
            if path.exists() and path.stat().st_size + len(data) > self._max_bytes:
                path = self._day_file(day, number + 1)
            _append(path, data)
        return path

    def days(self) -> list[tuple[date, int, Path]]:
        """Daily files: day, number of the file, path; oldest first."""
        found = []
        for path in self.folder.glob("*.md"):
            match = _DAY.fullmatch(path.name)
            if match is None:
                continue
            with contextlib.suppress(ValueError):  # somebody's file that looks like one
                found.append((date.fromisoformat(match[1]), int(match[2] or 1), path))
        return sorted(found)

    def day(self, day: date) -> str:
        """The text of a day, all its files."""
        return "\n".join(self._read(path) for found, _, path in self.days() if found == day)

    def count(self, text: str) -> int:
        """How often a text stands in the files, as `ForgetFilter` compares."""
        paths = self.folder.rglob("*.md") if self.folder.is_dir() else ()
        return sum(folded(self._read(path)).count(folded(text)) for path in paths)

    def erase(self) -> int:
        """Delete the folder with all that is in it; how many files there were."""
        if not self.folder.is_dir():
            return 0
        with self._alone():
            if not self.folder.is_dir():  # somebody else was faster
                return 0
            count = sum(path.is_file() and path.name != _OLD_LOCK_FILE for path in self.folder.rglob("*"))
            shutil.rmtree(self.folder)
        return count

    def _day_file(self, day: date, number: int) -> Path:
        return self.folder / (f"{day.isoformat()}.md" if number == 1 else f"{day.isoformat()}.{number}.md")

    def _read(self, path: Path) -> str:
        try:
            # What is no UTF-8 is written back as it was.
            return path.read_bytes().decode("utf-8", "surrogateescape")
        except FileNotFoundError:
            return ""

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._alone():
            self.folder.mkdir(exist_ok=True, mode=0o700)  # here, as it may have been erased while this waited
            yield

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        locks = self.folder.parent / _LOCKS
        locks.mkdir(parents=True, exist_ok=True, mode=0o700)
        name = hashlib.sha256(self.folder.name.encode("utf-8", "surrogateescape")).hexdigest()[:2]
        with _THREADS, (locks / name).open("a") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed, also by a kill
            yield


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _append(path: Path, data: bytes) -> None:
    """Write at the end of a file: all of it, or nothing when the disk is full."""
    # Without O_BINARY Windows writes another end of line than was counted.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if os.write(descriptor, data) < len(data):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace(path: Path, data: bytes, seen: tuple[int, int, int] | None) -> bool:
    """Put a file in place of another; not when somebody's editor wrote that meanwhile."""
    fresh = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with fresh.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if _stamp(path) != seen:
            return False
        if seen is not None:
            shutil.copymode(path, fresh)  # whoever could write the old one can write the new one
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    _keep(path.parent)
    return True


def _keep(folder: Path) -> None:
    """Make a replacement survive a power cut, where folders can be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
