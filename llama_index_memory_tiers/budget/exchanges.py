"""Tool calls and their results: what belongs together, and what is left of an exchange of which a part is gone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llama_index.core.base.llms.types import ChatMessage, ToolCallBlock

from llama_index_memory_tiers.roles import (
    ANSWERING_ROLES,
    RESULT_ROLES,
    SYSTEM_ROLES,
    Call,
    answered_by,
    calls_of,
    tool_of,
)

Missing = Literal["no call", "no result"]


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The tool exchanges of a window.

    Args:
        broken: What is missing, by the index of each message that is left of a broken exchange.
        order: All indexes, each result behind its call; `None` when that is where they stand.
    """

    broken: Mapping[int, Missing] = field(default_factory=dict)
    order: Sequence[int] | None = None


@dataclass(slots=True)
class _Exchange:
    """A message that calls tools: its calls that have no result yet, all of them, and the results."""

    row: int
    open: list[Call]
    calls: Sequence[Call]
    results: list[int] = field(default_factory=list)


def exchanges_of(messages: Iterable[ChatMessage]) -> Exchanges:
    """Find results without their call, and calls without all of their results, which models' providers refuse.

    A part may be gone because it was forgotten, because it left the window of a chat store, or because the process
    died between the two. The newest calls may be waiting for their results: they are broken when the talk has gone on.
    What cannot be told is taken for whole.

    Args:
        messages: A window, oldest first.

    Returns:
        See `Exchanges`.
    """
    messages = list(messages)
    if not any(map(_takes_part, messages)):
        return Exchanges()
    calls = [calls_of(message) for message in messages]
    broken: dict[int, Missing] = {}
    exchanges: list[_Exchange] = []
    before = -1  # the last message that is no result
    for at, message in enumerate(messages):
        if message.role not in RESULT_ROLES:
            before = at
            if calls[at]:
                exchanges.append(_Exchange(at, list(calls[at]), calls[at]))
            continue
        unrecorded = before >= 0 and messages[before].role in ANSWERING_ROLES and not calls[before]
        exchange = _answered(exchanges, message, before)
        if exchange is not None:
            exchange.results.append(at)
        elif answered_by(message) or not unrecorded:
            broken[at] = "no call"
    silent = (*RESULT_ROLES, *SYSTEM_ROLES)
    talk = max((at for at, message in enumerate(messages) if message.role not in silent and not calls[at]), default=-1)
    answered = max((exchange.row for exchange in exchanges if exchange.results), default=-1)
    for exchange in exchanges:
        if exchange.open and exchange.row < max(talk, answered):
            broken |= dict.fromkeys((exchange.row, *exchange.results), "no result")
    return Exchanges(broken, _order(len(messages), exchanges))


def _answered(exchanges: Sequence[_Exchange], message: ChatMessage, before: int) -> _Exchange | None:
    """The exchange that a result belongs to; the call that it answers is not open any more."""
    answers, name = answered_by(message), tool_of(message)
    for fits in (
        lambda call: bool(answers) and call.id == answers,
        lambda call: not call.id and bool(call.name) and call.name in {answers, name},
    ):
        for exchange in reversed(exchanges):
            if (call := next(filter(fits, exchange.open), None)) is not None:
                exchange.open.remove(call)
                return exchange
    if not exchanges:
        return None
    newest = exchanges[-1]
    call = next((call for call in newest.open if not (answers and call.id)), None)
    if call is not None:
        newest.open.remove(call)
        return newest
    # Another result of a call that has one, right behind it.
    again = newest.row == before and (not answers or answers in {call.id or call.name for call in newest.calls})
    return newest if again else None


def _order(count: int, exchanges: Sequence[_Exchange]) -> Sequence[int] | None:
    behind = {exchange.row: exchange.results for exchange in exchanges}
    moved = {at for exchange in exchanges for at in exchange.results}
    order = [one for at in range(count) if at not in moved for one in (at, *behind.get(at, ()))]
    return None if order == list(range(count)) else order


def _takes_part(message: ChatMessage) -> bool:
    """Whether a message may call or answer; quick, as most windows are talk alone."""
    if message.role in RESULT_ROLES or message.additional_kwargs:
        return True
    return any(isinstance(block, ToolCallBlock) for block in message.blocks)
