"""What happened, for machines: LlamaIndex's instrumentation events."""

from __future__ import annotations

from typing import Any

from llama_index.core.instrumentation.events import BaseEvent
from llama_index_instrumentation import get_dispatcher

from llama_index_memory_tiers.records import Changes

dispatcher = get_dispatcher("llama_index_memory_tiers")


class MemoryEvent(BaseEvent):
    """Base of our events; none carries a message's text unless `include_texts(True)` was called.

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


class BatchPrepared(MemoryEvent):
    """A block has drafted what it will write; nothing is written yet."""

    block: str
    messages: int
    seconds: float


class BatchAbsorbed(MemoryEvent):
    """A block absorbed a range of a session: what it wrote is committed."""

    block: str
    messages: int
    added: int
    revised: int = 0
    superseded: int = 0
    evicted: int = 0


class RecordsChanged(MemoryEvent):
    """Records were changed by hand, not by messages."""

    block: str
    added: int = 0
    revised: int = 0
    superseded: int = 0
    evicted: int = 0


class RecordsEvicted(MemoryEvent):
    """Records were put aside: by their block's cap, by a rule of retention, or by hand."""

    block: str
    count: int


class BlockRecalled(MemoryEvent):
    """A block answered a request for a context."""

    block: str
    items: int
    seconds: float


class MemoryForgotten(MemoryEvent):
    """Messages and records were deleted on request; the receipt says more."""

    messages: int
    records: int
    complete: bool


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


class SegmentEvent(MemoryEvent):
    """Something happened to a topic of the middle tier."""

    block: str
    segment: str


class SegmentCreated(SegmentEvent):
    """A new topic came up."""

    pages: int


class SegmentMerged(SegmentEvent):
    """Pages joined a topic that was there."""

    pages: int


class SegmentHeated(SegmentEvent):
    """A topic became hot."""

    heat: float


class SegmentPromoted(SegmentEvent):
    """A hot topic was analysed into long-term memory."""

    pages: int
    profile_version: int | None
    knowledge: int


class SegmentEvicted(SegmentEvent):
    """A topic was put aside to make room."""

    heat: float


class RecordsRetired(MemoryEvent):
    """A maintenance put records aside, or replaced duplicates."""

    block: str
    archived: int
    merged: int


class ModelCalled(MemoryEvent):
    """A block asked its language model; the texts are there only after `include_texts(True)`."""

    block: str
    purpose: str
    seconds: float
    tokens: int = 0
    error: str | None = None
    model: str = ""
    prompt: str | None = None
    answer: str | None = None


def emit(event: MemoryEvent) -> None:
    """Send an event to LlamaIndex's instrumentation."""
    dispatcher.event(event)


def emit_changes(event: type[BatchAbsorbed | RecordsChanged], block: str, changes: Changes, **about: Any) -> None:
    """Tell what a merge wrote, after it was committed.

    Args:
        event: Which event.
        block: Key of the block.
        changes: What was written.
        about: Further fields of the event.
    """
    emit(
        event(
            block=block,
            added=len(changes.add),
            revised=len(changes.revise),
            superseded=len(changes.supersede),
            evicted=len(changes.archive),
            **about,
        )
    )
    if changes.archive:
        emit(RecordsEvicted(session_id=about.get("session_id", ""), block=block, count=len(changes.archive)))
    for more in changes.events:
        emit(more)
