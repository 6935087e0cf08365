"""What people do with the tiers by hand: look at them, pin, list and roll back profiles."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from llama_index.core.base.llms.types import MessageRole

from llama_index_memory_tiers.blocks.desk import Desk
from llama_index_memory_tiers.blocks.heat.merging import METER
from llama_index_memory_tiers.blocks.heat.promotion import (
    AGENT,
    KNOWLEDGE,
    PROFILE,
    USER,
    LongTerm,
    profile_record,
    version,
)
from llama_index_memory_tiers.blocks.heat.segments import KIND, read_segment, segment_record
from llama_index_memory_tiers.blocks.heat.sharing import granted
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.events import SegmentView, TiersReport, TierView
from llama_index_memory_tiers.records import Changes, NewRecord, Reads, Record, StoredMessage
from llama_index_memory_tiers.storage import OwnerReader
from llama_index_memory_tiers.text import analyse

_HOTTEST = 10
_PENDING_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class ProfileVersion:
    """One version of a profile.

    Args:
        number: From 1.
        text: One sentence a line.
        created_at: When it was written.
        current: Whether it is the one that is shown.
    """

    number: int
    text: str
    created_at: datetime
    current: bool


async def profile_versions(reader: OwnerReader) -> list[ProfileVersion]:
    """All versions of an owner's profile, oldest first."""
    return [
        ProfileVersion(version(record), record.text, record.created_at, record.live)
        for record in await reader.history(PROFILE)
    ]


async def roll_back(desk: Desk, number: int) -> None:
    """Show an older version of the profile again, as a new version: nothing is lost.

    Args:
        desk: The block's.
        number: Of the version.

    Raises:
        ConfigurationError: There is no such version.
    """
    reader = await desk.reader()
    wanted = next((record for record in await reader.history(PROFILE) if version(record) == number), None)
    if wanted is None:
        numbers = [str(one.number) for one in await profile_versions(reader)]
        raise ConfigurationError(
            f"version={number!r} was given.",
            allowed=f"The profile has the versions: {', '.join(numbers) or 'none'}.",
            remedy="Pass one of them.",
        )
    whole = (await reader.by_ids([wanted.id]))[0]
    id_ = desk.new_id()

    def merge(records: Sequence[Record]) -> Changes:
        current = records[-1] if records else None
        about = {"restored": number}
        record = profile_record(
            whole.text, current, whole.sources, desk.now(), data=about, new_id=lambda: id_, count=desk.counter.text
        )
        if current is None:
            return Changes(add=(record,))
        return Changes(add=(record,), supersede={current.id: record.id})

    await desk.change(merge, Reads(kinds=(PROFILE,)))


async def learn(
    desk: Desk,
    notes: Sequence[tuple[datetime, str, bool]],
    capacity: int,
    by: Literal["importance", "fifo"],
    approve: Callable[[list[NewRecord], OwnerReader], Awaitable[list[NewRecord]]],
) -> int:
    """Add knowledge by hand: what is known is not added twice, and what is too much leaves.

    Args:
        desk: The block's.
        notes: When it was said, the text, and whether it is about the assistant.
        capacity: How many are kept on each side.
        by: What leaves first.
        approve: Marks what the agent may tell all its users.

    Returns:
        How many were new.
    """
    given = [(said_at, " ".join(desk.redacted(text).split()), agent) for said_at, text, agent in notes]
    records = await approve([_note(desk, *one) for one in given if one[1]], await desk.reader())
    learnt = 0

    def merge(known: Sequence[Record]) -> Changes:
        nonlocal learnt
        long = LongTerm(None, {record.id: record for record in known})
        learnt = sum([long.learn(record) for record in records])
        long.shrink(capacity, desk.now(), by)
        new = tuple(long.add.values())
        return Changes(add=new, supersede=long.supersede, archive=tuple(long.archive), share=granted(new))

    await desk.change(merge, Reads(kinds=(KNOWLEDGE,)))
    return learnt


def _note(desk: Desk, said_at: datetime, text: str, agent: bool) -> NewRecord:
    return NewRecord(
        id=desk.new_id(),
        kind=KNOWLEDGE,
        text=text,
        data={"about": AGENT if agent else USER} | ({"agent": desk.scope.agent_id} if agent else {}),
        said_at=said_at,
        terms=analyse(text),
        tokens=desk.counter.text(text),
    )


async def set_profile(desk: Desk, text: str) -> bool:
    """Write a profile by hand, as its next version; whether it says anything new."""
    told, id_ = desk.redacted(text).strip(), desk.new_id()
    reader = await desk.reader()
    if not told or told in {record.text for record in await reader.history(PROFILE)}:
        return False

    def merge(records: Sequence[Record]) -> Changes:
        current = records[-1] if records else None
        record = profile_record(told, current, (), desk.now(), data={}, new_id=lambda: id_, count=desk.counter.text)
        return Changes(add=(record,), supersede={} if current is None else {current.id: id_})

    await desk.change(merge, Reads(kinds=(PROFILE,)))
    return True


async def pin(desk: Desk, segment: str, *, pinned: bool) -> None:
    """Keep a segment whatever its heat, or no longer.

    Args:
        desk: The block's.
        segment: Id of the segment.
        pinned: Which.

    Raises:
        ConfigurationError: There is no such segment.
    """

    def merge(records: Sequence[Record]) -> Changes:
        found = [record for record in records if record.kind == KIND and record.live]
        if not found:
            raise ConfigurationError(
                f"segment={segment!r:.100} was given.",
                allowed="It is the id of a segment of this owner that was not put aside.",
                remedy="Look at atiers(memory).hottest for the ids.",
            )
        return Changes(revise=(segment_record(replace(read_segment(found[0]), pinned=pinned)),))

    await desk.change(merge, Reads(ids=(segment,)))


async def tiers(desk: Desk, capacities: Mapping[str, int], weights: Mapping[str, float]) -> TiersReport:
    """Look at the tiers of one owner.

    Args:
        desk: The block's.
        capacities: Of `short`, `middle` and `long`.
        weights: Of the heat.

    Returns:
        Counts, tokens, and the hottest topics with the parts of their heat.
    """
    reader, now = await desk.reader(), desk.now()
    segments = [read_segment(record) for record in await reader.light(KIND)]
    visits = await reader.visits(KIND)
    known = await reader.light(KNOWLEDGE)
    profiles = await reader.light(PROFILE)
    meters = await reader.light(METER)
    waiting = await _waiting(desk)
    views = []
    for one in segments:
        parts = one.parts(visits.get(one.id), now, weights)
        heats = (parts.total, parts.visits, parts.pages, parts.recency)
        views.append(SegmentView(one.id, one.title, *heats, one.pages, one.unanalysed, one.pinned))
    views.sort(key=lambda view: (-view.heat, view.id))
    long_tokens = sum(record.tokens for record in (*known, *profiles))
    return TiersReport(
        tiers=(
            TierView(
                "short",
                sum(stored.role == MessageRole.USER for stored in waiting),
                sum(stored.tokens for stored in waiting),
                capacities["short"],
            ),
            TierView("middle", len(segments), sum(one.tokens for one in segments), capacities["middle"]),
            TierView("long", len(known), long_tokens, capacities["long"]),
        ),
        hottest=tuple(views[:_HOTTEST]),
        profile_version=version(profiles[-1]) if profiles else None,
        calls=sum(_count(record.data.get("calls")) for record in meters),
    )


async def _waiting(desk: Desk) -> list[StoredMessage]:
    """What the session said that is not filed yet."""
    storage, scope = desk.storage, desk.scope
    session = await storage.log.session(scope.user_id or "", scope.session_id)
    if session is None:
        return []
    cursor = (await storage.cursors.all(session.sid)).get(desk.block)
    after = cursor.pos if cursor is not None else 0
    rows, _ = await storage.log.read(session.sid, session.session_id, after=after, limit=_PENDING_ROWS)
    return list(rows)


def _count(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0
