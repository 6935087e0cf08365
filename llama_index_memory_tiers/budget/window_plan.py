"""A window cut into pieces that come and go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from llama_index.core.base.llms.types import MessageRole

from llama_index_memory_tiers.budget.exchanges import exchanges_of
from llama_index_memory_tiers.budget.flushing import (
    WindowRow,
    call_groups,
    leading,
    turns_or_groups,
    window_row,
)
from llama_index_memory_tiers.budget.items import Row


@dataclass(frozen=True, slots=True)
class Unit:
    """Messages of the window that come and go together."""

    rows: tuple[int, ...]
    tokens: int
    kind: Literal["lead", "newest", "older"]


class WindowPlan:
    """A window cut into pieces that come and go together; it holds until the window changes.

    Args:
        rows: The window, oldest first.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self.tokens = sum(row.tokens for row in rows)
        """Size of the whole window."""
        self.places = frozenset(row.place for row in rows if row.place is not None)
        """Where its messages stand in the log."""
        self.counted = {id(row.message): (row.message, row.tokens) for row in rows}
        """Messages and their sizes, by identity."""
        self.exchanges = exchanges_of(row.message for row in rows)
        """Tool calls and their results: what is broken is not shown."""

    @property
    def must(self) -> tuple[int, ...]:
        """Index of the newest user message, if there is one."""
        return self._cut[0]

    @property
    def units(self) -> tuple[Unit, ...]:
        """The rest, in order of claim."""
        return self._cut[1]

    @cached_property
    def _cut(self) -> tuple[tuple[int, ...], tuple[Unit, ...]]:
        # Only when the window does not fit: a window of 1 000 messages takes 3 ms to cut.
        window = [window_row(index, row.message, row.tokens) for index, row in enumerate(self._rows)]
        lead = leading(window)
        turns = turns_or_groups([row for row in window[lead:] if row.seq not in self.exchanges.broken])
        newest = turns.pop() if turns else []
        must = next((row.seq for row in reversed(newest) if row.role == MessageRole.USER), None)

        def unit(members: Sequence[WindowRow], kind: Literal["lead", "newest", "older"]) -> Unit:
            return Unit(tuple(row.seq for row in members), sum(row.tokens for row in members), kind)

        units = [unit([row], "lead") for row in window[:lead]]
        units += [unit(group, "newest") for group in reversed(call_groups(r for r in newest if r.seq != must))]
        units += [unit(turn, "older") for turn in reversed(turns)]
        return () if must is None else (must,), tuple(units)
