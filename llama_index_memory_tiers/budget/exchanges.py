"""Tool calls and their results: what is left of an exchange of which a part is gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock

from llama_index_memory_tiers.budget.flushing import ANSWERING_ROLES, RESULT_ROLES, WindowRow, window_row
from llama_index_memory_tiers.budget.items import Row

Missing = Literal["no call", "no result"]


@dataclass(slots=True)
class _Exchange:
    """A message that calls tools, the calls that have no result yet, and the results."""

    rows: list[int]
    open: list[str]


def broken_exchanges(rows: Sequence[Row]) -> Mapping[int, Missing]:
    """Find results without their call, and calls without all of their results, which models' providers refuse.

    A part may be gone because it was forgotten, because it left the window of a chat store, or because the process
    died between the two. The newest calls may be waiting for their results: they are broken when the talk has gone on.
    A result that names no call answers the newest message that can have called.

    Args:
        rows: A window, oldest first.

    Returns:
        What is missing, by the index of each message that is left of a broken exchange.
    """
    if not any(_takes_part(row.message) for row in rows):
        return {}
    return _broken([window_row(index, row.message, row.tokens) for index, row in enumerate(rows)])


def _takes_part(message: ChatMessage) -> bool:
    return (
        message.role in RESULT_ROLES
        or bool(message.additional_kwargs)
        or any(isinstance(block, ToolCallBlock) for block in message.blocks)
    )


def _broken(rows: Iterable[WindowRow]) -> dict[int, Missing]:
    broken: dict[int, Missing] = {}
    exchanges: list[_Exchange] = []
    by_call: dict[str, _Exchange] = {}
    newest: _Exchange | None = None
    talk = -1  # the last message that is neither a call nor a result
    for row in rows:
        if row.role not in RESULT_ROLES:
            talk = talk if row.has_tool_calls else row.seq
            if row.role in ANSWERING_ROLES:
                newest = _Exchange([row.seq], list(row.calls) or [""] * bool(row.has_tool_calls))
                exchanges.append(newest)
                by_call.update(dict.fromkeys(row.calls, newest))
            continue
        exchange = by_call.get(row.answers)
        if exchange is None and newest is not None and (not row.answers or "" in newest.open):
            exchange = newest
        if exchange is None:
            broken[row.seq] = "no call"
            continue
        exchange.rows.append(row.seq)
        answered = row.answers if row.answers in exchange.open else next(iter(exchange.open), None)
        if answered is not None:
            exchange.open.remove(answered)
    for exchange in exchanges:
        if exchange.open and exchange.rows[0] < talk:
            broken |= dict.fromkeys(exchange.rows, "no result")
    return broken
