"""Named places between two steps, where a test may let things go wrong; in production each is an empty call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

FAILPOINTS: Final = (
    "transaction.begun",  # SQLite takes its lock with the statement behind it
    "transaction.committed",
    "put.prepared",
    "put.inserted",
    "put.stored",
    "flush.planned",
    "flush.archived",
    "prepare.claimed",
    "prepare.done",
    "merge.fenced",
    "merge.written",
    "merge.committed",
    "index.read",
    "index.updated",
    "index.told",
    "forget.noted",
    "forget.tombstoned",
    "forget.messages",
    "forget.records",
    "forget.blocks",
    "forget.verified",
    "reindex.page",
    "reindex.switching",
    "reindex.switched",
    "migrate.statement",
    "migrate.done",
)
"""Every boundary: behind the step that the name tells. `transaction.committed` is where a COMMIT's reply gets lost."""

_armed: Callable[[str], None] | None = None


def reach(name: str) -> None:
    """Tell that a step is done.

    Args:
        name: One of `FAILPOINTS`.
    """
    if _armed is not None:
        _armed(name)


@contextmanager
def armed(act: Callable[[str], None]) -> Iterator[None]:
    """Have a function called at every failpoint of this process; it may raise, or end the process.

    Args:
        act: Gets the name; called in whatever thread gets there.

    Yields:
        Nothing; afterwards the function of before is back.
    """
    global _armed  # noqa: PLW0603  # one switch for the process, so that an unarmed failpoint costs one comparison
    before, _armed = _armed, act
    try:
        yield
    finally:
        _armed = before
