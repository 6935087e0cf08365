"""Whatever reads the log behind a cursor of its own, and where its next batch ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from llama_index.core.base.llms.types import MessageRole

from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.records import Batch, Changes, Forgotten, Reads, Record, StoredMessage
from llama_index_memory_tiers.roles import ANSWERING_ROLES, SYSTEM_ROLES
from llama_index_memory_tiers.storage import OwnerReader

Trigger = Literal["turn", "flush", "idle"]


class Consumer(Protocol):
    """Whatever reads the log behind a cursor of its own."""

    @property
    def key(self) -> str:
        """Name of the cursor."""

    @property
    def absorb_on(self) -> frozenset[Trigger]:
        """What makes a batch due."""

    @property
    def absorb_every(self) -> int:
        """Complete turns that make a batch due."""

    @property
    def hold_back(self) -> int:
        """Newest complete turns that stay unread until the session is idle or flushed by hand."""

    @property
    def idle_seconds(self) -> float:
        """Silence after which everything is due."""

    @property
    def batch_tokens(self) -> int:
        """Bound of one batch."""

    @property
    def timeout_seconds(self) -> float:
        """Bound of one `prepare`."""

    @property
    def backfill(self) -> bool:
        """Read old sessions from the beginning although a model is used."""

    @property
    def per_session(self) -> bool:
        """Each session has records of its own."""

    @property
    def uses_model(self) -> bool:
        """Absorbing costs model calls."""

    @property
    def holds_external_data(self) -> bool:
        """It keeps something outside the storage."""

    async def forget(self, forgotten: Forgotten) -> None:
        """Delete what it keeps outside the storage."""

    async def prepare(self, batch: Batch, reader: OwnerReader, counter: TokenCounter) -> Any:
        """Slow: may call models, writes nothing."""

    def reads(self, draft: Any) -> Reads:
        """Name the records that `merge` must see afresh."""

    def merge(self, draft: Any, records: Sequence[Record]) -> Changes:
        """Pure and quick: runs in the transaction that moves the cursor, perhaps more than once."""


@dataclass(frozen=True, slots=True)
class Due:
    """What decides how far a batch may reach.

    Args:
        to_head: Take everything, complete turns or not (an explicit flush).
        silent_seconds: How long the session has been silent.
        flushed_until: The last sequence number that has left the window.
    """

    to_head: bool = False
    silent_seconds: float = 0.0
    flushed_until: int = 0


def turn_ends(rows: Sequence[StoredMessage]) -> list[int]:
    """Sequence numbers at which a turn is complete.

    A turn ends before the next user message, or with an assistant's answer that calls no tool.

    Args:
        rows: Messages in order.

    Returns:
        Ends, ascending.
    """
    ends = []
    for at, row in enumerate(rows):
        following = rows[at + 1] if at + 1 < len(rows) else None
        if following is not None:
            if following.role == MessageRole.USER and row.role not in SYSTEM_ROLES:
                ends.append(row.seq)
        elif row.role in ANSWERING_ROLES and not row.calls_tool:
            ends.append(row.seq)
    return ends


def plan_batch(
    consumer: Consumer,
    rows: Sequence[StoredMessage],
    last: int,
    due: Due,
    *,
    max_messages: int,
    full: bool = False,
    done: int = 0,
) -> int | None:
    """Decide where the next batch ends.

    Args:
        consumer: Whose batch.
        rows: What lies behind its cursor, in order.
        last: Sequence number of the last row that was read, damaged or not.
        due: See `Due`.
        max_messages: Bound of the batch.
        full: More lies behind the cursor than a batch may hold: it is due however many turns it has, or a turn
            of a hundred tool calls would never be.
        done: Sequence number at which the cursor stands.

    Returns:
        Sequence number of the batch's end, or `None` when nothing is due.
    """
    flush_only = consumer.absorb_on == {"flush"}
    hi = 0
    idle = "idle" in consumer.absorb_on and due.silent_seconds >= consumer.idle_seconds
    if (due.to_head and not flush_only) or idle:
        hi = last
    ends = turn_ends(rows)
    free = ends[: len(ends) - consumer.hold_back] if len(ends) > consumer.hold_back else []
    if "turn" in consumer.absorb_on and (full or len(free) >= consumer.absorb_every):
        hi = max(hi, free[-1] if free else ends[-1] if ends else last)
    if "flush" in consumer.absorb_on:
        hi = max(hi, min(last, due.flushed_until))
    reach = [row for row in rows if row.seq <= hi]
    if not reach:
        # Damaged or forgotten rows only: the cursor passes them.
        return hi if hi > done else None
    kept = _bounded(reach, max_messages, consumer.batch_tokens)
    return hi if kept == len(reach) else reach[kept - 1].seq


def _bounded(rows: Sequence[StoredMessage], max_messages: int, max_tokens: int) -> int:
    tokens = 0
    for at, row in enumerate(rows):
        tokens += row.tokens
        if at and (at >= max_messages or tokens > max_tokens):
            return at
    return len(rows)
