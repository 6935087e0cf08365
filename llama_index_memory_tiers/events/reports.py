"""What happened, for people: reports that show themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llama_index_memory_tiers.display import Grid, Shown, counted
from llama_index_memory_tiers.records import Departure

_SHOWN_CHARS = 160
_SHOWN_LEFT_OUT = 10  # of each part: hundreds may not have fit


@dataclass(frozen=True, slots=True)
class BlockProgress:
    """How far one block is with the sessions that a flush went through.

    Args:
        block: Its key.
        absorbed: Messages absorbed by this call.
        pending: Messages that it has not absorbed.
        error: Kind of the newest failure, `busy` while another worker is at it, or `None`.
        parked: Ranges put aside as dead letters by this call.
        in_window: Of those pending, how many are not due: the block absorbs what has left the window.
    """

    block: str
    absorbed: int = 0
    pending: int = 0
    error: str | None = None
    parked: int = 0
    in_window: int = 0


@dataclass(frozen=True, slots=True)
class FlushReport(Shown):
    """What a flush did.

    Args:
        blocks: One entry per block that absorbs.
    """

    blocks: tuple[BlockProgress, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing waits any more that is due."""
        return not any(block.pending > block.in_window for block in self.blocks)

    def plus(self, progress: Iterable[BlockProgress]) -> FlushReport:
        """The same with what was done elsewhere, block by block; the newest failure stays."""
        total = {block.block: block for block in self.blocks}
        for more in progress:
            before = total.get(more.block, BlockProgress(more.block))
            total[more.block] = BlockProgress(
                more.block,
                before.absorbed + more.absorbed,
                before.pending + more.pending,
                more.error or before.error,
                before.parked + more.parked,
                before.in_window + more.in_window,
            )
        return FlushReport(tuple(total.values()))

    def _grids(self) -> Sequence[Grid]:
        # Only some blocks wait for what stands in the window.
        waits = any(block.in_window for block in self.blocks)
        rows = [
            (b.block, b.absorbed, b.pending, *([b.in_window] * waits), b.parked, b.error or "") for b in self.blocks
        ]
        return [Grid(("block", "absorbed", "pending", *(["in window"] * waits), "parked", "error"), rows)]


@dataclass(frozen=True, slots=True)
class ForgetEntry:
    """What one store had of what was to be forgotten, and what a second reading of it found.

    Args:
        store: `messages`, `records`, `sources`, `embeddings`, `terms`, `packs`, `dead letters`, `cursors moved back`,
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
class ForgetReceipt(Shown):
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

    def _grids(self) -> Sequence[Grid]:
        told = [entry for entry in self.entries if entry.removed or not entry.verified]  # the others had nothing
        shown = [(e.store, e.removed, "unknown" if e.left is None else e.left, e.error or "") for e in told]
        shown += [(name, 0, "unknown", "not ours") for name in self.unreached]
        return [Grid(("store", "removed", "left", "error"), shown)]


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
        absorb_error: Kind of failure that keeps the block from reading the newest messages of the session.
    """

    name: str
    priority: int
    tokens: int
    kept: tuple[ItemReport, ...] = ()
    left_out: tuple[ItemReport, ...] = ()
    error: str | None = None
    absorb_error: str | None = None

    @property
    def problem(self) -> str:
        """What failed, in words; '' for nothing."""
        unread = f"could not absorb: {self.absorb_error}" if self.absorb_error else ""
        return "; ".join(filter(None, (self.error, unread)))


@dataclass(frozen=True, slots=True)
class ContextReport(Shown):
    """Where the tokens of one context went, and what was left out and why.

    Args:
        query: What recall was asked for.
        limit: Tokens that were allowed, after the reserve.
        tokens: Tokens of the messages returned, as rendered.
        window_tokens: Tokens of the window that is shown.
        window_messages: Messages of the window that are shown.
        window_left_out: Messages of the window that are not shown.
        window_broken: Of these, what is left of tool calls without result, or of results without their call.
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
    window_broken: int = 0

    def _grids(self) -> Sequence[Grid]:
        head = f"{self.tokens} of {self.limit} tokens" + (" (overflow)" if self.overflow else "")
        return [Grid(("part", "priority", "tokens", "kept", "left out", "error"), self._rows(), head)]

    def _details(self) -> Sequence[Grid]:
        rows: list[tuple[Any, ...]] = [
            (
                part.name,
                "kept" if kept else item.reason,
                item.tokens,
                f"{item.score:.2f}",
                ", ".join(f"{leg} {value:.2f}" for leg, value in item.legs.items()),
                item.text if len(item.text) <= _SHOWN_CHARS else f"{item.text[:_SHOWN_CHARS]}…",
            )
            for part in self.parts
            for kept, items in ((True, part.kept), (False, part.left_out[:_SHOWN_LEFT_OUT]))
            for item in items
        ]
        heads: Sequence[str] = ("part", "", "tokens", "score", "found by", "item")
        if len(self.parts) == 1:  # they are all of one part
            heads, rows = heads[1:], [row[1:] for row in rows]
        return [Grid(heads, rows)] if rows else []

    def _rows(self) -> list[tuple[Any, ...]]:
        broken = f"{self.window_broken} of broken tool calls" if self.window_broken else ""
        rows: list[tuple[Any, ...]] = [
            ("window", "", self.window_tokens, self.window_messages, self.window_left_out, broken)
        ]
        rows += [(p.name, p.priority, p.tokens, len(p.kept), len(p.left_out), p.problem) for p in self.parts]
        return rows


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A topic of the middle tier.

    Args:
        id: Public id.
        title: What it is about.
        heat: How warm it is.
        visits: Share of the visits in it.
        pages: Share of the pages.
        recency: Share of the time since it was last touched.
        page_count: Pages in it.
        unanalysed: Those that no model has analysed yet.
        pinned: Never put aside.
    """

    id: str
    title: str
    heat: float
    visits: float
    pages: float
    recency: float
    page_count: int
    unanalysed: int
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier of a memory.

    Args:
        name: `short`, `middle` or `long`.
        count: What is in it: pairs, segments, pieces of knowledge.
        tokens: Their size when shown.
        capacity: How many it holds.
    """

    name: str
    count: int
    tokens: int
    capacity: int


@dataclass(frozen=True, slots=True)
class TiersReport(Shown):
    """The tiers of a heat block, for one owner.

    Args:
        tiers: From short to long.
        hottest: Topics, the hottest first.
        profile_version: Version of the profile; `None` when there is none.
        calls: Model calls that were paid for what is stored.
    """

    tiers: tuple[TierView, ...]
    hottest: tuple[SegmentView, ...] = ()
    profile_version: int | None = None
    calls: int = 0

    def _grids(self) -> Sequence[Grid]:
        tiers = [(t.name, t.count, t.tokens, t.capacity) for t in self.tiers]
        hottest = [
            (one.title, f"{one.heat:.2f}", f"{one.visits:g}", f"{one.pages:g}", f"{one.recency:.2f}", one.unanalysed)
            for one in self.hottest
        ]
        profile = "none" if self.profile_version is None else f"version {self.profile_version}"
        return [
            Grid(("tier", "count", "tokens", "capacity"), tiers),
            Grid((), (), f"profile: {profile}, model calls: {self.calls}"),
            Grid(("segment", "heat", "visits", "pages", "recency", "unanalysed"), hottest),
        ]


@dataclass(frozen=True, slots=True)
class MaintenanceReport(Shown):
    """What a maintenance put aside, or would.

    Args:
        departures: One entry per record; put aside, not deleted.
        dry_run: Whether nothing was changed.
    """

    departures: tuple[Departure, ...] = ()
    dry_run: bool = True

    def _grids(self) -> Sequence[Grid]:
        rows = [(one.block, one.kind, one.record_id, one.policy, one.reason) for one in self.departures]
        head = f"{counted(len(rows), 'record')} {'would leave' if self.dry_run else 'left'}"
        return [Grid(("block", "kind", "record", "policy", "reason"), rows, head)]
