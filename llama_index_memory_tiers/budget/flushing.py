"""Plan a flush: which whole turns leave the window, oldest first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory.memory import DEFAULT_FLUSH_SIZE

from llama_index_memory_tiers.roles import ANSWERING_ROLES, RESULT_ROLES, SYSTEM_ROLES, answered_by, calls_of


@dataclass(frozen=True, slots=True)
class WindowRow:
    """A message of the window as a plan sees it.

    Args:
        seq: Position in its session.
        role: Role of the message.
        tokens: Its size.
        has_tool_calls: Whether it calls tools; `None` when only the role is known.
        calls: Ids of the tool calls it makes.
        answers: Id of the tool call it answers.
    """

    seq: int
    role: str
    tokens: int
    has_tool_calls: bool | None = None
    calls: tuple[str, ...] = ()
    answers: str = ""


def window_row(seq: int, message: ChatMessage, tokens: int) -> WindowRow:
    """Make the row of a message that is at hand.

    Args:
        seq: Position in its session.
        message: The message.
        tokens: Its size.

    Returns:
        A row that knows which tools the message calls or answers.
    """
    calls = calls_of(message)
    return WindowRow(
        seq,
        message.role,
        tokens,
        has_tool_calls=bool(calls),
        calls=tuple(call.id for call in calls if call.id),
        answers=answered_by(message),
    )


def plan_flush(
    window: Sequence[WindowRow],
    *,
    limit_tokens: int,
    flush_tokens: int,
    window_messages: int | None = None,
    flush_messages: int = 1,
) -> tuple[int, ...]:
    """Decide which messages leave the window: oldest first, whole turns.

    A turn starts at each user message; turns that a tool call and its result connect are one. Leading system
    messages stay, and so does the newest turn, however large: a turn that alone exceeds the limit causes no
    repeated flush. Without a user message the newest message stays, or the newest tool call with its results.
    After a flush the window is within both limits, unless what stays by these rules is larger.

    Args:
        window: Active messages, oldest first.
        limit_tokens: Size above which the window is flushed.
        flush_tokens: When it is flushed for its size, about that many tokens move: another turn goes while
            that brings their sum nearer to this number.
        window_messages: Number of messages above which it is flushed, leading system messages not counted.
            This alone moves no more than it must, or one message too many would empty a window of short ones.
        flush_messages: When it is flushed for its number, at least so many messages move, as whole turns.

    Returns:
        Sequence numbers to archive, ascending; empty when there is nothing to do.
    """
    body = window[leading(window) :]
    tokens, count = sum(row.tokens for row in window), len(body)
    most = count if window_messages is None else window_messages
    wanted = flush_tokens if tokens > limit_tokens else 0
    least = flush_messages if count > most else 0
    moved: list[int] = []
    moved_tokens = 0
    for turn in turns_or_groups(body)[:-1]:
        size = sum(row.tokens for row in turn)
        needed = tokens - moved_tokens > limit_tokens or count - len(moved) > most or len(moved) < least
        if not needed and moved_tokens + size / 2 >= wanted:
            break
        moved.extend(row.seq for row in turn)
        moved_tokens += size
    return tuple(moved)


def usual_flush(limit: int, window: int) -> int:
    """How many tokens leave the window at once when nothing is said.

    Args:
        limit: The token limit.
        window: Tokens that the window may hold.

    Returns:
        A tenth of the limit, at most 3 000 as in stock, and at most half the window: a small one would be emptied.
    """
    return max(1, min(DEFAULT_FLUSH_SIZE, limit // 10, window // 2))


def leading(window: Sequence[WindowRow]) -> int:
    """How many system messages lead a window."""
    return next((index for index, row in enumerate(window) if row.role not in SYSTEM_ROLES), len(window))


def _calls_tools(row: WindowRow) -> bool:
    return row.role in ANSWERING_ROLES if row.has_tool_calls is None else row.has_tool_calls


def turns_or_groups(body: Sequence[WindowRow]) -> list[list[WindowRow]]:
    """Cut a window behind its leading messages into turns, or without any user message into calls with results."""
    if any(row.role == MessageRole.USER for row in body):
        return _together(body, lambda row: row.role == MessageRole.USER)
    return _together(body, lambda row: row.role not in RESULT_ROLES)


def _together(rows: Iterable[WindowRow], starts: Callable[[WindowRow], bool]) -> list[list[WindowRow]]:
    """Cut rows where one starts a stretch, and join stretches that a tool call and its result connect."""
    stretches: list[list[WindowRow]] = []
    called_in: dict[str, int] = {}
    latest: int | None = None
    for row in rows:
        if not stretches or starts(row):
            stretches.append([])
        here = len(stretches) - 1
        stretches[here].append(row)
        if row.role in RESULT_ROLES:
            home = called_in.get(row.answers, here if latest is None else latest)
            if home < here:
                stretches[home:] = [[row for stretch in stretches[home:] for row in stretch]]
                called_in = {call: min(at, home) for call, at in called_in.items()}
                latest = here = home
        if _calls_tools(row):
            latest = here
            called_in.update(dict.fromkeys(row.calls, here))
    return stretches


def call_groups(rows: Iterable[WindowRow]) -> list[list[WindowRow]]:
    """Cut a turn into single messages and tool calls with their results; results may stand apart."""
    groups: list[list[WindowRow]] = []
    called_in: dict[str, list[WindowRow]] = {}
    caller: list[WindowRow] | None = None
    answer: list[WindowRow] | None = None
    for row in rows:
        home = called_in.get(row.answers, caller or answer) if row.role in RESULT_ROLES else None
        if home is not None:
            home.append(row)
            continue
        groups.append([row])
        caller = groups[-1] if _calls_tools(row) else caller
        answer = groups[-1] if row.role in ANSWERING_ROLES else answer
        called_in.update(dict.fromkeys(row.calls, groups[-1]))
    return groups
