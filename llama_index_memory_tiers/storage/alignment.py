"""Which stored messages a wanted window consists of, and what has to move for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogRow:
    """What an alignment needs to know of a stored message."""

    seq: int
    active: bool
    hash: str | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Alignment:
    """How the window becomes what is wanted.

    Args:
        kept: So many of the wanted messages, from the first, are in the log already.
        archive: Sequence numbers that leave the window.
        restore: Sequence numbers that come back into it.
    """

    kept: int
    archive: tuple[int, ...]
    restore: tuple[int, ...]


def plan_alignment(log: Sequence[LogRow], wanted: Sequence[str], *, room_tokens: int | None) -> Alignment:
    """Find the wanted messages in the log, in order, up to the first that is new.

    From the first new message on everything is appended, as sequence numbers only grow. A server that resends the
    whole history every turn finds all of it, flushed or not, and its window is left alone; a history that replaces
    the window brings archived messages back, the newest first, while there is room.

    Args:
        log: Active and archived messages, oldest first.
        wanted: Content hashes of the wanted window, oldest first.
        room_tokens: Size of the window in tokens; `None` means that it holds exactly what is wanted.

    Returns:
        The plan.
    """
    # What is in the window is preferred to older messages that say the same.
    matched = max(_matched([row for row in log if row.active], wanted), _matched(log, wanted), key=len)
    kept = {row.seq for row in matched}
    dropped = tuple(row.seq for row in log if row.active and row.seq not in kept)
    used = sum(row.tokens for row in matched if row.active)
    restore: list[int] = []
    if dropped or not used or room_tokens is None:
        for row in reversed([row for row in matched if not row.active]):
            used += row.tokens
            if room_tokens is not None and used > room_tokens:
                break
            restore.append(row.seq)
    return Alignment(len(matched), dropped, tuple(reversed(restore)))


def _matched(rows: Iterable[LogRow], wanted: Sequence[str]) -> list[LogRow]:
    matched: list[LogRow] = []
    left = iter(rows)
    for name in wanted:
        found = next((row for row in left if row.hash == name), None)
        if found is None:
            break
        matched.append(found)
    return matched
