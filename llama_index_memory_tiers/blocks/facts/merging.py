"""Keep a list of facts within its bound: what is new, what stands for others, what is put aside."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from llama_index_memory_tiers.blocks.facts.changes import Move, decide
from llama_index_memory_tiers.records import Changes, NewRecord, Record
from llama_index_memory_tiers.sameness import Known, shared


@dataclass(frozen=True, slots=True)
class Condensed:
    """A fact that is to stand for others.

    Args:
        record: The fact.
        replaces: Ids of records and of new facts of the same draft.
    """

    record: NewRecord
    replaces: frozenset[str]


@dataclass(frozen=True, slots=True)
class FactsDraft:
    """What one batch gave.

    Args:
        new: Facts that it says.
        condensed: Facts for which others make room; empty unless there were too many.
        dropped: Ids of facts that a condensed list covers or leaves out for good.
        left_out: Ids of facts that a condensed list does not mention: either they matter least, or the answer was
            cut; they go first when something has to.
        moves: What the batch says, decided about when it is merged.
        expired: Ids of facts whose time was over when the batch was prepared.
    """

    new: tuple[NewRecord, ...] = ()
    condensed: tuple[Condensed, ...] = ()
    dropped: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    moves: tuple[Move, ...] = ()
    expired: frozenset[str] = frozenset()


def merge_moves(draft: FactsDraft, records: Sequence[Record], max_facts: int) -> Changes:
    """Decide about everything that a batch says, among all facts as they are now.

    Args:
        draft: What one batch gave; its `new` is decided here, from its `moves`.
        records: All facts, those that are over as well, oldest first.
        max_facts: How many may be current afterwards; pinned ones stay in any case.

    Returns:
        What to write. A fact in whose favour another one ended is always written, even when it is put aside at once.
    """
    outcome = decide(draft.moves, records)
    out = outcome.ended | draft.expired
    live = [record for record in records if record.live and record.id not in out]
    merged = merge_facts(replace(draft, new=outcome.current), live, max_facts)
    written = {record.id for record in merged.add}
    heirs = set(outcome.superseded.values())
    covered, aside, kept = {}, [], []
    for record in outcome.current:
        if record.id in written or record.id not in heirs:
            continue
        kept.append(record)
        whole = next((one.record.id for one in draft.condensed if record.id in one.replaces), None)
        if whole in written:
            covered[record.id] = whole
        else:
            aside.append(record.id)
    return Changes(
        add=(*merged.add, *kept, *outcome.past),
        supersede={**outcome.superseded, **merged.supersede, **covered},
        archive=(*outcome.archived, *merged.archive, *aside),
        amend=outcome.amended,
    )


def merge_facts(draft: FactsDraft, live: Sequence[Record], max_facts: int) -> Changes:
    """Decide what becomes of a draft among the facts as they are now.

    Args:
        draft: What one batch gave.
        live: Current facts, oldest first.
        max_facts: How many may be current afterwards.

    Returns:
        New facts that are not known; condensed ones in place of those that are still there; and, when there are
        still too many, the oldest put aside, condensed ones last.
    """
    there = {record.id for record in live} | {record.id for record in draft.new}
    condensed = [one for one in draft.condensed if one.replaces & there]
    replaced = frozenset(one for each in condensed for one in each.replaces) & there
    gone = replaced | (draft.dropped & there)
    staying = [record for record in live if record.id not in gone]
    accepted: dict[str, NewRecord] = {}
    successor: dict[str, str] = {}  # id of a condensed fact → id of the fact that says it
    known = Known((record.id, record.text) for record in staying)
    for record in (*(one.record for one in condensed), *(one for one in draft.new if one.id not in gone)):
        same = known.find(record.text)
        successor[record.id] = same or record.id
        if same is None:
            accepted[record.id] = record
            known.add(record.id, record.text)
    whole = {one.record.id for one in condensed}
    current: list[Record | NewRecord] = [*staying, *accepted.values()]
    loose = [one for one in current if not one.data.get("pinned")]
    evicted = set(_oldest(loose, len(current) - max_facts, first=draft.left_out, last=whole))
    supersede, archive = _ends(live, condensed, successor, gone, evicted)
    return Changes(
        add=tuple(record for record in accepted.values() if record.id not in evicted),
        supersede=supersede,
        archive=archive,
    )


def _ends(
    live: Sequence[Record],
    condensed: Sequence[Condensed],
    successor: Mapping[str, str],
    gone: Collection[str],
    evicted: Collection[str],
) -> tuple[dict[str, str], tuple[str, ...]]:
    """What replaces the facts that go, and which of them nothing replaces."""
    supersede: dict[str, str] = {}
    archive: list[str] = []
    for record in live:
        if record.id in evicted:
            archive.append(record.id)
        elif record.id in gone:
            heirs = [one.record for one in condensed if record.id in one.replaces]
            heirs = [heir for heir in heirs if successor[heir.id] not in evicted]
            if heirs:
                heir = max(heirs, key=lambda one: shared(record.text, one.text))
                supersede[record.id] = successor[heir.id]
            else:
                archive.append(record.id)
    return supersede, tuple(archive)


def _oldest(
    facts: Sequence[Record | NewRecord], count: int, *, first: Collection[str], last: Collection[str]
) -> list[str]:
    if count <= 0:
        return []

    def age(pair: tuple[int, Record | NewRecord]) -> tuple[int, float, int]:
        at, fact = pair
        said = said_at(fact)
        rank = (fact.id in last) - (fact.id in first)
        return rank, said.timestamp() if said is not None else float("inf"), at

    return [fact.id for _, fact in sorted(enumerate(facts), key=age)[:count]]


def said_at(fact: Record | NewRecord) -> datetime | None:
    """When a fact was said, or else written; `None` for a new one of which nothing is known."""
    return fact.said_at or (fact.created_at if isinstance(fact, Record) else None)
