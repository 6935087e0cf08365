"""Promotion: what a hot segment adds to the profile and to what is known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from llama_index_memory_tiers.extraction.insight import Note
from llama_index_memory_tiers.heat import Known, overflow_order
from llama_index_memory_tiers.moments import aware
from llama_index_memory_tiers.records import NewRecord, Place, Record
from llama_index_memory_tiers.sameness import Words, same_note, words
from llama_index_memory_tiers.text import analyse

KNOWLEDGE = "fact"
PROFILE = "profile"
USER, AGENT = "user", "agent"
# Relations of which one has several at a time: a second one contradicts nothing.
_MANY = re.compile(
    r"(?i)\b(?:likes?|loves?|enjoys?|prefers? also|hates?|dislikes?|has|have|owns?|knows?|wants?|needs?|visited|read|"
    r"speaks?|plays?|member|friend|child|pet|hobby|hobbies|interest|skill|allerg\w+|recommended|promised|said)\b"
    r"|喜欢|讨厌|有|会|去过|推荐|爱好|朋友"
)


@dataclass(frozen=True, slots=True)
class Promotion:
    """What the analysis of one hot segment brought; applied only if the segment is as it was then.

    Args:
        segment: Its id.
        pages: How many pages it had.
        analysed: How many of them are analysed now.
        before: How many were before.
        visits: Visits so far, which the heat forgets.
        profile: The new version, or `None` when it says what the old one says.
        replaces: Id of the profile that it was written from, or `None` for the first.
        knowledge: Pieces of knowledge.
    """

    segment: str
    pages: int
    analysed: int
    before: int
    visits: int
    profile: NewRecord | None = None
    replaces: str | None = None
    knowledge: tuple[NewRecord, ...] = ()


@dataclass(slots=True)
class LongTerm:
    """Profile and knowledge while a merge decides.

    Args:
        profile: The current profile's id.
        known: Current knowledge by id.
        add: What will be written.
        supersede: Old id → new id.
        archive: Ids to put aside.
    """

    profile: str | None
    known: dict[str, Record | NewRecord]
    add: dict[str, NewRecord] = field(default_factory=dict)
    supersede: dict[str, str] = field(default_factory=dict)
    archive: list[str] = field(default_factory=list)

    def _replace(self, old: str, new: NewRecord) -> None:
        if old in self.add:
            del self.add[old]  # it was never written
            for before, after in list(self.supersede.items()):
                if after == old:
                    self.supersede[before] = new.id
        else:
            self.supersede[old] = new.id
        self.known.pop(old, None)

    def take_profile(self, record: NewRecord) -> None:
        """Make this the current profile; the one before stays as a version, even if the same merge wrote it."""
        if self.profile is not None:
            self.supersede[self.profile] = record.id
        self.add[record.id] = record
        self.profile = record.id

    def learn(self, note: NewRecord) -> bool:
        """Add a piece of knowledge; whether the set grew or changed.

        What says the same is merged, sources joined; what has another value for the same subject and relation is
        superseded by the newer one.
        """
        rivals = [one for one in self.known.values() if side(one) == side(note)]
        same = next((one for one in rivals if same_note(one.text, note.text)), None)
        if same is not None:
            self._merge(same, note)
            return False
        for one in rivals:
            if contradicts(one, note):
                if said(one) > said(note):
                    return False  # an older message says what was true before
                self._replace(one.id, note)
        self.add[note.id] = note
        self.known[note.id] = note
        return True

    def _merge(self, old: Record | NewRecord, note: NewRecord) -> None:
        places = tuple(dict.fromkeys((*old.sources, *note.sources)))
        if set(places) <= set(old.sources):
            return
        data = {**old.data, "importance": max(importance(old), importance(note))}
        data["shared"] = bool(old.data.get("shared") and note.data.get("shared"))  # its words, still allowed
        merged = replace(note, text=old.text, data=data, sources=places, said_at=max(said(old), said(note)))
        self._replace(old.id, merged)
        self.add[merged.id] = merged
        self.known[merged.id] = merged

    def shrink(self, capacity: int, now: datetime, by: Literal["importance", "fifo"]) -> None:
        """Put aside what is too much, on each side."""
        sides: dict[str, list[Record | NewRecord]] = {}
        for one in self.known.values():
            sides.setdefault(side(one), []).append(one)
        for members in sides.values():
            order = overflow_order((Known(one.id, importance(one), said(one)) for one in members), now, by=by)
            for id_ in order[: max(0, len(members) - capacity)]:
                del self.known[id_]
                if id_ in self.add:
                    # What it replaced is still superseded: by what nobody keeps.
                    self.archive += [old for old, new in self.supersede.items() if new == id_]
                    self.supersede = {old: new for old, new in self.supersede.items() if new != id_}
                    del self.add[id_]
                else:
                    self.archive.append(id_)


def side(one: Record | NewRecord) -> str:
    """Whose knowledge it is: the user's, or that of one agent."""
    about = str(one.data.get("about", USER))
    return about if about != AGENT else f"{AGENT}/{one.data.get('agent') or ''}"


def importance(one: Record | NewRecord) -> float:
    """0 to 1; .5 when it is not known."""
    value = one.data.get("importance", 0.5)
    return float(value) if isinstance(value, int | float) else 0.5


def said(one: Record | NewRecord) -> datetime:
    """When it was said, or written when that is not known."""
    when = one.said_at or (one.created_at if isinstance(one, Record) else None)
    assert when is not None  # noqa: S101  # notes carry the time of their pages
    return aware(when)


def contradicts(one: Record | NewRecord, other: Record | NewRecord) -> bool:
    """Whether two pieces of knowledge give one relation of one subject two values."""
    mine, theirs = _relation(one), _relation(other)
    return bool(mine) and mine == theirs and _value(one) != _value(other)


def _relation(one: Record | NewRecord) -> tuple[str, str] | None:
    subject, relation = (" ".join(str(one.data.get(name, "")).casefold().split()) for name in ("subject", "relation"))
    return (subject, relation) if subject and relation and not _MANY.search(relation) else None


def _value(one: Record | NewRecord) -> Words:
    return words(str(one.data.get("value", "")))


def knowledge_records(
    notes: Iterable[Note],
    places: Sequence[Sequence[Place]],
    times: Sequence[datetime],
    *,
    agent: str | None,
    about: Mapping[str, Any],
    new_id: Callable[[], str],
    count: Callable[[str], int],
) -> list[NewRecord]:
    """Notes of a model as records with their provenance.

    Args:
        notes: What it wrote.
        places: The messages of each page that it was shown.
        times: When each page was said.
        agent: Whose agent knowledge it would be.
        about: What wrote them.
        new_id: Makes public ids.
        count: Measures texts.

    Returns:
        One record per note.
    """
    records = []
    for note in notes:
        told = {name: getattr(note, name) for name in ("subject", "relation", "value", "importance")}
        whose = {"about": AGENT, "agent": agent} if note.agent else {"about": USER}
        sources = tuple(dict.fromkeys(place for number in note.pages for place in places[number - 1]))
        records.append(
            NewRecord(
                id=new_id(),
                kind=KNOWLEDGE,
                text=note.text,
                data={**whose, **told, **about},
                said_at=max(times[number - 1] for number in note.pages),
                sources=sources,
                terms={**analyse(note.subject), **analyse(note.text)},
                tokens=count(note.text),
            )
        )
    return records


def profile_record(
    text: str,
    old: Record | NewRecord | None,
    sources: Iterable[Place],
    now: datetime,
    *,
    data: Mapping[str, Any],
    new_id: Callable[[], str],
    count: Callable[[str], int],
) -> NewRecord:
    """The next version of a profile.

    Args:
        text: One sentence a line.
        old: The version before, or `None`.
        sources: The messages it was written from.
        now: The clock.
        data: What wrote it.
        new_id: Makes public ids.
        count: Measures texts.

    Returns:
        The record.
    """
    return NewRecord(
        id=new_id(),
        kind=PROFILE,
        text=text,
        data={"version": version(old) + 1, **data},
        said_at=now,
        sources=tuple(dict.fromkeys(sources)),
        tokens=count(text),
    )


def version(profile: Record | NewRecord | None) -> int:
    """Number of a profile's version, from 1; 0 when there is none."""
    return 0 if profile is None else int(profile.data.get("version", 0))
