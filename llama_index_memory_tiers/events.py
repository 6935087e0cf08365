"""What happened, for machines (instrumentation events) and for people (reports)."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index.core.instrumentation.events import BaseEvent
from llama_index_instrumentation import get_dispatcher

dispatcher = get_dispatcher("llama_index_memory_tiers")


class MemoryEvent(BaseEvent):
    """Base of our events; none carries a message's text.

    Args:
        session_id: The session it happened in.
    """

    session_id: str = ""

    @classmethod
    def class_name(cls) -> str:
        """Name used by handlers."""
        return cls.__name__


class MessagesPut(MemoryEvent):
    """Messages were stored."""

    stored: int
    active_tokens: int


class WindowFlushed(MemoryEvent):
    """Old turns left the window."""

    archived: int


class BatchAbsorbed(MemoryEvent):
    """A block absorbed a range of a session."""

    block: str
    messages: int
    added: int


class BlockFailed(MemoryEvent):
    """A block could not absorb or answer; the chat went on."""

    block: str
    error: str
    attempts: int = 0
    parked: bool = False


class EmbeddingMismatch(BlockFailed):
    """Stored embeddings are those of another model: words alone find what has not been embedded again."""

    stored_dimensions: int
    asked_dimensions: int
    stored_model: str = ""
    asked_model: str = ""
    remedy: str = ""


class IndexDegraded(MemoryEvent):
    """An external index did not answer or is behind; the database answered in its place."""

    error: str
    pending: int | None = None


class ContextBuilt(MemoryEvent):
    """A context was handed out."""

    tokens: int
    limit: int
    overflow: bool


def emit(event: MemoryEvent) -> None:
    """Send an event to LlamaIndex's instrumentation."""
    dispatcher.event(event)


@dataclass(frozen=True, slots=True)
class BlockProgress:
    """How far one block is with the sessions that a flush went through.

    Args:
        block: Its key.
        absorbed: Messages absorbed by this call.
        pending: Messages that still wait.
        error: Kind of the newest failure, `busy` while another worker is at it, or `None`.
        parked: Ranges put aside as dead letters by this call.
    """

    block: str
    absorbed: int = 0
    pending: int = 0
    error: str | None = None
    parked: int = 0


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What a flush did.

    Args:
        blocks: One entry per block that absorbs.
    """

    blocks: tuple[BlockProgress, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing waits any more."""
        return not any(block.pending for block in self.blocks)

    def __str__(self) -> str:
        return table(
            ("block", "absorbed", "pending", "parked", "error"),
            [(b.block, b.absorbed, b.pending, b.parked, b.error or "") for b in self.blocks],
        )


@dataclass(frozen=True, slots=True)
class ForgetEntry:
    """What one store had of what was to be forgotten, and what a second reading of it found.

    Args:
        store: `messages`, `records`, `sources`, `embeddings`, `terms`, `dead letters`, `cursors moved back`,
            `caches`, `write-ahead log`, or the name of a block that holds data elsewhere.
        removed: Rows that are gone.
        left: Rows that are there all the same; `None` when the store could not be read again.
        error: Kind of the failure.
    """

    store: str
    removed: int = 0
    left: int | None = 0
    error: str | None = None

    @property
    def verified(self) -> bool:
        """Whether it was read again, and nothing was there."""
        return self.left == 0 and self.error is None


@dataclass(frozen=True, slots=True)
class ForgetReceipt:
    """What was forgotten, as proven by reading every store again after the deletes.

    Args:
        entries: One per store.
        unreached: Blocks that are not ours: what they have kept in themselves is theirs to delete.
    """

    entries: tuple[ForgetEntry, ...] = ()
    unreached: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing is left anywhere, and nothing was out of reach."""
        return not self.pending and not self.unreached

    @property
    def pending(self) -> tuple[str, ...]:
        """Stores that still hold something, or could not be read again."""
        return tuple(entry.store for entry in self.entries if not entry.verified)

    @property
    def removed(self) -> Mapping[str, int]:
        """Rows that are gone, by store."""
        return {entry.store: entry.removed for entry in self.entries}

    def __str__(self) -> str:
        shown = [(e.store, e.removed, "unknown" if e.left is None else e.left, e.error or "") for e in self.entries]
        shown += [(name, 0, "unknown", "not ours") for name in self.unreached]
        return table(("store", "removed", "left", "error"), shown)


@dataclass(frozen=True, slots=True)
class ItemReport:
    """One item that a block offered.

    Args:
        text: As it is rendered.
        tokens: Its size.
        score: The block's own measure.
        legs: Which leg of the search found it, with what score.
        reason: Why it was left out; '' when it was kept.
    """

    text: str
    tokens: int
    score: float
    legs: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PartReport:
    """What became of one block's section.

    Args:
        name: Of the block.
        priority: Of the block.
        tokens: Its share of the context.
        kept: Items that went in.
        left_out: Items that did not, with the reason.
        error: Kind of failure when the block could not answer.
    """

    name: str
    priority: int
    tokens: int
    kept: tuple[ItemReport, ...] = ()
    left_out: tuple[ItemReport, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ContextReport:
    """Where the tokens of one context went, and what was left out and why.

    Args:
        query: What recall was asked for.
        limit: Tokens that were allowed, after the reserve.
        tokens: Tokens of the messages returned, as rendered.
        window_tokens: Tokens of the window that is shown.
        window_messages: Messages of the window that are shown.
        window_left_out: Messages of the window that did not fit.
        parts: One entry per block.
        overflow: Whether what must be shown alone exceeds the limit.
        messages: The context itself.
    """

    query: str
    limit: int
    tokens: int
    window_tokens: int
    window_messages: int
    window_left_out: int
    parts: tuple[PartReport, ...]
    overflow: bool
    messages: tuple[Any, ...] = ()

    def __str__(self) -> str:
        head = f"{self.tokens} of {self.limit} tokens" + (" (overflow)" if self.overflow else "")
        return f"{head}\n{table(_HEADS, self._rows())}"

    def _rows(self) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = [
            ("window", "", self.window_tokens, self.window_messages, self.window_left_out, "")
        ]
        rows += [(p.name, p.priority, p.tokens, len(p.kept), len(p.left_out), p.error or "") for p in self.parts]
        return rows

    def _repr_html_(self) -> str:
        cells = [f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in self._rows()]
        heads = "".join(f"<th>{head}</th>" for head in _HEADS)
        return (
            f"<p>{self.tokens} of {self.limit} tokens{' (overflow)' if self.overflow else ''}</p>"
            f"<table><tr>{heads}</tr>{''.join(cells)}</table>"
        )


_HEADS = ("part", "priority", "tokens", "kept", "left out", "error")


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Write rows below heads, in columns."""
    lines = [[str(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
