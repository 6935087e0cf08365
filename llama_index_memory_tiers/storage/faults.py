"""Faults of a database: which a repeat may outlive, and what callers are told of the others."""

from __future__ import annotations

import ssl

from sqlalchemy.exc import DBAPIError

from llama_index_memory_tiers.errors import StorageError

# Serialisation failure, deadlock, lock not available, administrator shutdown, cannot connect now.
_RETRY_STATES = ("40001", "40P01", "55P03", "57P01", "57P03")
_NO_ENTRY = ("28", "3D")  # invalid authorisation, no such database
_NO_DATABASE = ("file is not a database", "database disk image is malformed", "malformed database schema")


def passing(error: DBAPIError | OSError, *, server: bool) -> bool:
    """Whether a repeat may outlive a fault: locks, deadlocks, lost connections, a server that is being restarted.

    Args:
        error: What a driver or the operating system raised.
        server: The database is a server, which may be away for a while.

    Returns:
        Whether to try again.
    """
    if isinstance(error, OSError):
        # A server that is away shows in many ways: no socket file, no route, no name for the moment.
        lasting = ssl.SSLError | PermissionError if server else OSError
        return isinstance(error, ConnectionError | TimeoutError) or not isinstance(error, lasting)
    if error.connection_invalidated:
        return True
    original = error.orig
    state = str(getattr(original, "sqlstate", None) or getattr(original, "pgcode", None) or "")
    if state.startswith("08") or state in _RETRY_STATES:
        return True
    words = str(original).lower()
    return any(sign in words for sign in ("is locked", "is busy", "connection is closed", "connection was closed"))


def as_storage_error(error: DBAPIError | OSError) -> StorageError:
    """Convert without the statement's parameters, which hold users' text.

    Args:
        error: What a driver or the operating system raised.

    Returns:
        What to raise instead.
    """
    original = getattr(error, "orig", None) or error
    first_line = str(original).partition("\n")[0][:200]
    if first_line.startswith(_NO_DATABASE):
        return StorageError(
            f"The file is not a SQLite database, or it is damaged ({first_line}).",
            allowed="It is a database file that SQLite can read to its end.",
            remedy="Restore a backup, or recover it with sqlite3 .recover; nothing of this call was stored.",
        )
    state = str(getattr(original, "sqlstate", None) or "")
    if state.startswith(_NO_ENTRY):
        return StorageError(
            f"The database server refused the connection ({first_line}).",
            allowed="The address names a user who may connect, that user's password, and a database that exists.",
            remedy="Correct the address, or make the database (createdb) and the user; nothing was stored.",
        )
    return StorageError(
        f"The database refused a statement ({type(original).__name__}: {first_line}).",
        allowed="The disk must be writable and the schema the one that this package made.",
        remedy="Check disk, permissions and table name; nothing of this call was stored.",
    )
