"""Where a database is: a path, a URI or nothing at all, checked before anything is opened."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from llama_index_memory_tiers.errors import (
    ConfigurationError,
    MissingExtraError,
)

_DRIVERS = {"sqlite": "aiosqlite", "postgresql": "asyncpg"}
_EXTRAS = {"asyncpg": "postgres"}


@dataclass(frozen=True, slots=True)
class Address:
    """Where the database is.

    Args:
        url: SQLAlchemy URL with an async driver.
        private: A directory to remove on close, when nobody named a place.
    """

    url: URL
    private: tempfile.TemporaryDirectory[str] | None = None

    @property
    def place(self) -> str:
        """Where it is, for messages to people: without user and password."""
        if self.url.get_backend_name() == "sqlite":
            return f"The database {self.url.database}"
        port = f":{self.url.port}" if self.url.port else ""
        return f"The database {self.url.database or ''} at {self.url.host or 'this host'}{port}"


def resolve_address(given: str | os.PathLike[str] | None) -> Address:
    """Turn a path, a database URI or nothing into an address.

    Args:
        given: A file path, a URI such as `sqlite+aiosqlite:///memory.db` or `postgresql+asyncpg://host/db`;
            `None` and in-memory URIs mean a private temporary directory, the same code path as a file.

    Returns:
        The address.

    Raises:
        ConfigurationError: The URI has no async driver, an unknown one, or the folder does not exist.
    """
    if given is not None and (not isinstance(given, str | os.PathLike) or "\0" in os.fspath(given)):
        raise ConfigurationError(
            f"storage={given!r:.100} was given.",
            allowed="It is a file path or a database URI.",
            remedy="Pass a path such as './memory.db', or leave it out for a private temporary database.",
        )
    if given is None or (isinstance(given, str) and _in_memory(given)):
        private = tempfile.TemporaryDirectory(prefix="memory-tiers-", ignore_cleanup_errors=True)
        return Address(_sqlite(Path(private.name) / "memory.db"), private)
    if isinstance(given, str) and "://" in given:
        return Address(_checked_url(given))
    path = Path(given).expanduser()
    if not str(given).strip() or not nameable(path) or path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigurationError(
            f"storage={str(given)!r:.200} was given.",
            allowed="A path names a database file in a folder that exists.",
            remedy="Create the folder, or pass a path such as './memory.db'.",
        )
    return Address(_sqlite(path))


def nameable(path: Path) -> bool:
    """Whether anything can stand at a path; nothing can under a name that is too long, or behind a file."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return True


def shown_url(url: URL) -> str:
    """Write a URL for people: without a password, wherever it stands."""
    secrets = {name: "***" for name in url.query if "pass" in name.lower()}
    return url.update_query_dict(secrets).render_as_string(hide_password=True)


def lacks_password(shown: str) -> bool:
    """Whether `shown_url` has taken a password out of this address."""
    try:
        url = make_url(shown)
    except (ArgumentError, ValueError):
        return False
    return "***" in (url.password, *url.query.values())


def _sqlite(path: Path) -> URL:
    return URL.create("sqlite+aiosqlite", database=str(path.absolute()))


def _in_memory(uri: str) -> bool:
    return uri in {":memory:", "sqlite+aiosqlite://", "sqlite+aiosqlite:///", "sqlite+aiosqlite:///:memory:"}


def _checked_url(uri: str) -> URL:
    try:
        url = make_url(uri)
    except (ArgumentError, ValueError):
        url = None
    if url is None or "@" in (url.host or ""):  # what looks like a port or a host may be a piece of the password
        raise ConfigurationError(
            "A database URI that cannot be read was given.",
            allowed="A URI looks like 'postgresql+asyncpg://user@host/database'.",
            remedy="Check the part before '://' and quote special characters in the password, such as '@' as %40.",
        )
    shown = shown_url(url)
    backend = url.get_backend_name()
    wanted = _DRIVERS.get(backend)
    if wanted is None:
        raise ConfigurationError(
            f"The database URI {shown!r} was given.",
            allowed="SQLite and PostgreSQL are supported.",
            remedy="Use 'sqlite+aiosqlite:///…' or 'postgresql+asyncpg://…'.",
        )
    extra = _EXTRAS.get(wanted)
    install = f" and install llama-index-memory-tiers[{extra}]" if extra else ""
    if "+" not in url.drivername or url.get_driver_name() != wanted:
        raise ConfigurationError(
            f"The database URI {shown!r} was given without its async driver.",
            allowed=f"The driver for {backend} is {wanted}.",
            remedy=f"Write {backend}+{wanted}://…{install}.",
        )
    try:
        __import__(wanted)
    except ImportError:
        raise MissingExtraError(
            f"The database URI {shown!r} was given, but {wanted} is not installed.",
            allowed=f"{backend} is reached through {wanted}.",
            remedy=f"Run: pip install 'llama-index-memory-tiers[{extra}]'.",
        ) from None
    return url


def holds_table(file: Path, prefix: str) -> bool:
    """Whether a SQLite file holds tables under a prefix; looks without changing a byte of it.

    Args:
        file: An existing file.
        prefix: Of the tables, or the name of one.

    Returns:
        False for an empty file and for other programs' databases; true as well for what is no database, whose error
        is for whoever opens it.
    """
    with contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        try:
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        except sqlite3.Error:
            return True
    return any(name.lower().startswith(prefix.lower()) for (name,) in names)
