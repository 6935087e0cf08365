"""Decide what becomes of facts that are said, replaced or taken back: by when they were said, not by when they came."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from llama_index_memory_tiers.records import Amendment, NewRecord, Place, Record
from llama_index_memory_tiers.sameness import Known, plain, same_note

Action = Literal["add", "supersede", "retract", "confirm"]
Key = tuple[str, str]
"""Subject and relation, without case, width, punctuation and articles; ('', '') when one is missing."""


@dataclass(frozen=True, slots=True)
class Move:
    """A change that a model, an extractor or a person proposes.

    Args:
        action: What it does.
        said_at: When that was said; decides which of two statements is the newer one.
        record: The new fact, for `add` and `supersede`.
        targets: Ids of the facts that it is about; `None` means all current ones of the same subject and relation.
        key: Subject and relation, as far as they were given.
        value: For a retraction by key: only facts with this value; '' for all.
        since: From when the new fact holds, or from when the retracted one does not; default `said_at`.
        until: When the new fact ends, if that was said.
        sources: The messages that say it.
        by_hand: A person decides: subject, relation and pins are no obstacle.
    """

    action: Action
    said_at: datetime
    record: NewRecord | None = None
    targets: frozenset[str] | None = frozenset()
    key: Key = ("", "")
    value: str = ""
    since: datetime | None = None
    until: datetime | None = None
    sources: tuple[Place, ...] = ()
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was decided.

    Args:
        current: New facts that hold.
        past: New facts that were over before they came: history.
        superseded: Id → id of the fact that holds instead, for facts old and new that are over.
        archived: Ids of facts, old and new, that are over and have no successor.
        amended: What changes about the others.
    """

    current: tuple[NewRecord, ...] = ()
    past: tuple[NewRecord, ...] = ()
    superseded: Mapping[str, str] = field(default_factory=dict)
    archived: tuple[str, ...] = ()
    amended: Mapping[str, Amendment] = field(default_factory=dict)

    @property
    def ended(self) -> frozenset[str]:
        """Ids of the facts that are over from now on."""
        return frozenset(self.superseded) | frozenset(self.archived)


def key_of(subject: str, relation: str) -> Key:
    """What two facts share when one may take the place of the other.

    Args:
        subject: Whom or what.
        relation: How.

    Returns:
        The key; ('', '') when one of both is missing, which is equal to nothing.
    """
    key = plain(subject), plain(relation)
    return key if all(key) else ("", "")


@dataclass(slots=True)
class _Row:
    """A fact while it is decided about."""

    id: str
    text: str
    data: Mapping[str, Any]
    order: int
    said: datetime
    start: datetime
    end: datetime | None = None
    ended_by: str | None = None
    ended_said: datetime | None = None
    ended_sources: tuple[Place, ...] = ()
    retracted: bool = False
    confirmed: datetime | None = None
    reworded: str | None = None
    live: bool = True
    deleted: bool = False
    new: NewRecord | None = None

    key: Key = field(init=False)

    def __post_init__(self) -> None:
        self.key = key_of(str(self.data.get("subject", "")), str(self.data.get("relation", "")))

    @property
    def value(self) -> str:
        return plain(str(self.data.get("value", "")))

    @property
    def pinned(self) -> bool:
        return bool(self.data.get("pinned"))

    @property
    def over(self) -> bool:
        """Whether it had ended already when its end was said, or never began; else it ends on a day to come."""
        return self.end is not None and (self.ended_said is None or self.end <= max(self.ended_said, self.start))

    @property
    def open(self) -> bool:
        return self.live and not self.over and not self.deleted

    def close(self, end: datetime, move: Move, *, by: str | None) -> None:
        self.end = max(self.start, end)
        self.ended_by, self.ended_said, self.ended_sources = by, move.said_at, move.sources
        self.retracted = by is None

    def reopen(self) -> None:
        self.end = self.ended_by = self.ended_said = None
        self.ended_sources, self.retracted = (), False

    def fields(self) -> dict[str, Any]:
        """Its data with what was decided."""
        own = {name: value for name, value in self.data.items() if name not in _DECIDED}
        times = {"valid_until": self.end, "ended_said": self.ended_said, "confirmed_at": self.confirmed}
        if self.start != self.said:
            times["valid_from"] = self.start
        own |= {name: time.isoformat() for name, time in times.items() if time is not None}
        if self.ended_by is not None:
            own["ended_by"] = self.ended_by
        if self.ended_sources:
            own["ended_sources"] = [list(place) for place in self.ended_sources]
        if self.retracted:
            own["retracted"] = True
        return own


_DECIDED = frozenset(
    {"valid_from", "valid_until", "ended_said", "confirmed_at", "ended_by", "ended_sources", "retracted"}
)


def moment(data: Mapping[str, Any], name: str) -> datetime | None:
    """A time in a fact's data.

    Args:
        data: Of the record.
        name: Of the field.

    Returns:
        The time, aware; `None` when there is none.
    """
    value = data.get(name)
    return datetime.fromisoformat(value) if isinstance(value, str) else None


def _row(record: Record, order: int) -> _Row:
    data = record.data
    said = record.said_at or record.created_at
    ended_by = data.get("ended_by")
    return _Row(
        id=record.id,
        text=record.text,
        data=data,
        order=order,
        said=said,
        start=moment(data, "valid_from") or said,
        end=moment(data, "valid_until"),
        ended_by=ended_by,
        ended_said=moment(data, "ended_said"),
        ended_sources=tuple((int(sid), int(seq)) for sid, seq in data.get("ended_sources", ())),
        retracted=bool(data.get("retracted")),
        confirmed=moment(data, "confirmed_at"),
        reworded=record.superseded_by if ended_by is None else None,
        live=record.live,
        deleted=bool(data.get("deleted")),
    )


def decide(moves: Iterable[Move], records: Sequence[Record]) -> Outcome:
    """Decide what becomes of facts; pure, and the same whatever the order in which statements came.

    Args:
        moves: What is proposed.
        records: All facts of the owner, those that are over as well, in the order of writing.

    Returns:
        What changes. Targets that are not known, not of the same subject and relation, or pinned are left alone; a
        statement that is older than what it would replace becomes history; a fact that is replaced always has a
        successor that is kept.
    """
    table = _Table(records)
    # Taken back first: who says in one breath that a thing is no more and what is instead means both.
    for move in sorted(moves, key=lambda one: (one.said_at, one.action != "retract")):
        if move.action == "retract":
            table.retract(move)
        elif move.action == "confirm":
            table.confirm(move)
        elif move.action == "supersede":
            table.supersede(move)
        else:
            table.add(move)
    return table.outcome()


class _Table:
    """The facts of one owner, changed move by move.

    Args:
        records: As they are stored.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._rows = {record.id: _row(record, at) for at, record in enumerate(records)}
        self._before = {id_: (row.fields(), row.over, row.live) for id_, row in self._rows.items()}
        self._known = Known((row.id, row.text) for row in self._rows.values() if row.open)

    def add(self, move: Move) -> None:
        """Add a fact that is not known; one that is known is confirmed."""
        new = self._made(move)
        known = self._same(new)
        if known is not None:
            known.confirmed = max(known.confirmed or known.said, move.said_at)
        elif not any(_told_before(row, new) for row in self._rows.values()):
            self._keep(new)

    def supersede(self, move: Move) -> None:
        """Put a fact in the place of others, or into their history when it was said before them."""
        new = self._made(move)
        targets = self._targets(move, new.key)
        if not targets:
            self.add(move)
            return
        again = next((row for row in targets if row.open and _alike(row, new)), None)
        if again is not None:
            again.confirmed = max(again.confirmed or again.said, move.said_at)
            for row in targets:
                if row is not again and row.said <= move.said_at and row.end is None:
                    row.close(new.start, move, by=again.id)
            return
        slot = self._slot(targets)
        earlier = [row for row in slot if row.said <= new.said]
        last = max(earlier, key=lambda row: (row.said, row.order), default=None)
        if last is not None and not last.retracted and _alike(last, new):
            return  # history that is known
        later = [row for row in slot if row.said > new.said]
        if later:
            first = min(later, key=lambda row: (row.start, row.said, row.order))
            if new.end is None or first.start < new.end:
                new.close(first.start, replace(move, said_at=first.said, sources=()), by=first.id)
        for row in earlier:
            if row.end is None or (row.end > new.start and not row.retracted):
                row.close(new.start, move, by=new.id)
        self._keep(new)

    def retract(self, move: Move) -> None:
        """End facts that no longer hold; what was said again since stays."""
        for row in self._targets(move, move.key):
            if row.said > move.said_at or row.over:
                continue
            at = move.since or move.said_at
            if row.said < row.start and at < row.start:  # a plan that was given up: what was before goes on
                for other in self._rows.values():
                    if other.ended_by == row.id and not other.over:
                        other.reopen()
            row.close(at, move, by=None)
            for leaf in self._rows.values():
                if leaf.reworded == row.id and leaf.end is None:
                    leaf.close(at, move, by=None)

    def confirm(self, move: Move) -> None:
        """Note that facts were said again."""
        for id_ in move.targets or ():
            row = self._rows.get(id_)
            if row is not None and row.open:
                row.confirmed = max(row.confirmed or row.said, move.said_at)

    def outcome(self) -> Outcome:
        """What has changed."""
        current: list[NewRecord] = []
        past: list[NewRecord] = []
        archived: list[str] = []
        superseded: dict[str, str] = {}
        amended: dict[str, Amendment] = {}
        for row in self._rows.values():
            fields, was_over, was_live = self._before.get(row.id, ({}, False, True))
            expires_at = row.end if row.end is not None and not row.over else None
            if row.over and was_live and not was_over:
                if row.ended_by is not None:
                    superseded[row.id] = row.ended_by
                else:
                    archived.append(row.id)
            if row.new is not None:
                made = replace(row.new, data=row.fields(), expires_at=expires_at)
                (past if row.over else current).append(made)
            elif row.fields() != fields:
                amended[row.id] = Amendment(row.fields(), expires_at)
        return Outcome(tuple(current), tuple(past), superseded, tuple(archived), amended)

    def _made(self, move: Move) -> _Row:
        assert move.record is not None  # noqa: S101  # adding and superseding bring one
        record = move.record
        row = _Row(
            id=record.id,
            text=record.text,
            data=record.data,
            order=len(self._rows),
            said=move.said_at,
            start=move.since or move.said_at,
            new=record,
        )
        if move.until is not None:
            row.close(move.until, move, by=None)
            row.retracted = False
        return row

    def _keep(self, row: _Row) -> None:
        self._rows[row.id] = row
        if not row.over:
            self._known.add(row.id, row.text)

    def _same(self, new: _Row) -> _Row | None:
        """The current fact that says the same."""
        found = self._known.find(new.text)
        row = self._rows.get(found) if found is not None else None
        return row if row is not None and row.open else None

    def _targets(self, move: Move, key: Key) -> list[_Row]:
        if move.targets is None:
            rows = [row for row in self._rows.values() if row.open and any(key) and row.key == key]
            rows = [row for row in rows if not move.value or row.value == plain(move.value)]
        else:
            rows = [self._rows[id_] for id_ in sorted(move.targets) if id_ in self._rows]
        if move.by_hand:
            return [row for row in rows if not row.deleted]
        right = key if any(key) or move.action == "supersede" else None
        return [
            row
            for row in rows
            if not (row.pinned or row.deleted) and (right is None or (any(right) and row.key == right))
        ]

    def _slot(self, targets: Sequence[_Row]) -> list[_Row]:
        """Facts that have stood in the place of these, one after the other; their other wordings as well."""
        key = targets[0].key
        rows = {row.id: row for row in self._rows.values() if row.key == key and not row.deleted}
        links = ((row.id, str(other)) for row in rows.values() for other in (row.ended_by, row.reworded) if other)
        found = linked([row.id for row in targets], (pair for pair in links if pair[1] in rows))
        return [row for row in self._rows.values() if row.id in found]


def linked(start: Sequence[str], pairs: Iterable[tuple[str, str]]) -> set[str]:
    """All that hangs together with something.

    Args:
        start: Ids to begin with.
        pairs: Ids that belong together.

    Returns:
        The ids that can be reached, those of the beginning among them.
    """
    near: dict[str, list[str]] = {}
    for one, other in pairs:
        near.setdefault(one, []).append(other)
        near.setdefault(other, []).append(one)
    found, waiting = set(start), list(start)
    while waiting:
        new = [other for other in near.get(waiting.pop(), ()) if other not in found]
        found.update(new)
        waiting.extend(new)
    return found


def _alike(one: _Row, other: _Row) -> bool:
    """Whether two statements in one place say the same."""
    if same_note(one.text, other.text):
        return True
    return bool(one.value) and any(one.key) and (one.key, one.value) == (other.key, other.value)


def _told_before(row: _Row, new: _Row) -> bool:
    """Whether a fact that is over says for its time what comes late."""
    if not row.over or row.end is None or row.deleted or row.ended_said is None:
        return False
    return row.start <= new.start < row.end and new.said < row.ended_said and _alike(row, new)
