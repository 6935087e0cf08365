"""Facts of one owner as people see them: looked up at any time, explained, and changed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Protocol

from llama_index_memory_tiers.blocks.desk import Desk
from llama_index_memory_tiers.blocks.facts.changes import Move, decide, key_of, linked
from llama_index_memory_tiers.blocks.facts.values import Fact, FactOrigin, confirmed, fact_of, holds, links
from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.checks import check_number, checked
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.moments import checked_time
from llama_index_memory_tiers.records import (
    Amendment,
    Changes,
    NewRecord,
    Reads,
    Record,
    Scope,
)
from llama_index_memory_tiers.sameness import Known

_KIND = "fact"
_BY_HAND = "by hand"
_MOST_DAYS = 36_525  # a hundred years


class FactWriter(Protocol):
    """What is asked of the block."""

    async def written(
        self, id_: str, text: str, data: Mapping[str, Any], when: datetime, counter: TokenCounter, scope: Scope
    ) -> NewRecord:
        """A fact that a person writes, as a record that can be found."""


class Facts:
    """The facts that a block keeps for one memory's owner; made by `block.of(memory)`.

    A fact is named by its id or by the `Fact` itself.

    Args:
        desk: Reads and writes the records.
        writer: The block.
    """

    def __init__(self, desk: Desk, writer: FactWriter) -> None:
        self._desk = desk
        self._writer = writer

    # -- looking ---------------------------------------------------------------------------------------------

    async def all(self) -> list[Fact]:
        """The facts that are on the list now, in the order in which they were written."""
        records = await (await self._desk.reader()).records(_KIND)
        return [fact_of(record, current=True) for record in records]

    @checked
    async def as_of(self, time: datetime) -> list[Fact]:
        """What held at a time, as far as is known today.

        Args:
            time: The moment; naive means UTC.

        Returns:
            Facts, by the beginning of their validity. What the bound has put aside counts until then.
        """
        at = checked_time("time", time)
        records = {record.id: record for record in await self._records()}
        found = [fact for fact in map(fact_of, records.values()) if holds(fact, records, at)]
        return sorted(found, key=lambda fact: fact.valid_from)

    @checked
    async def history(self, fact: Fact | str) -> list[Fact]:
        """All that stood in one fact's place, one after the other.

        Args:
            fact: One of them.

        Returns:
            The versions, by the beginning of their validity, other wordings of the same among them; none when the
            fact is not known.
        """
        records = {record.id: record for record in await self._records()}
        start = [_id(fact)] if _id(fact) in records else []
        pairs = (pair for record in records.values() for pair in links(record) if pair[1] in records)
        found = linked(start, pairs)
        return sorted((fact_of(records[one]) for one in found), key=lambda one: (one.valid_from, one.said_at))

    @checked
    async def why(self, fact: Fact | str) -> FactOrigin | None:
        """Where a fact comes from.

        Args:
            fact: Which.

        Returns:
            Its source messages, and what wrote it; `None` when it is not known.
        """
        record = await self._one(_id(fact))
        if record is None:
            return None
        log, owner = self._desk.storage.log, await self._desk.owner()
        places = [(int(sid), int(seq)) for sid, seq in record.data.get("ended_sources", ())]
        return FactOrigin(
            fact=fact_of(record),
            messages=tuple(await log.at(owner, record.sources)),
            ended_by=tuple(await log.at(owner, places)),
            model=str(record.data.get("model", "")),
            prompt=str(record.data.get("prompt", "")),
        )

    @checked
    async def unconfirmed(self, days: float = 90) -> list[Fact]:
        """Facts on the list that nobody has said or confirmed for long, to be reviewed.

        Args:
            days: For how long, in days; default 90.

        Returns:
            The facts, the longest unconfirmed first; pinned ones are not among them.
        """
        before = self._desk.now() - timedelta(days=check_number("days", days, least=0, most=_MOST_DAYS))
        found = [fact for fact in await self.all() if not fact.pinned and confirmed(fact) < before]
        return sorted(found, key=confirmed)

    # -- changing --------------------------------------------------------------------------------------------

    @checked
    async def add(
        self,
        text: str,
        *,
        subject: str = "",
        relation: str = "",
        value: str = "",
        since: datetime | None = None,
        until: datetime | None = None,
        replaces: Fact | str | None = None,
        pinned: bool = False,
    ) -> Fact:
        """Write a fact by hand; secrets in it are taken out.

        Args:
            text: The sentence.
            subject: Whom or what it is about.
            relation: How subject and value belong together.
            value: The rest.
            since: From when it holds; naive means UTC; default now.
            until: When it ends.
            replaces: A fact in whose place it comes; that one becomes history.
            pinned: Keep it whatever a model proposes.

        Returns:
            The fact; the one that is there already when it says the same.

        Raises:
            ConfigurationError: The text is empty, or the fact that it is to replace is not known.
        """
        sentence = self._sentence(text)
        begins = None if since is None else checked_time("since", since)
        ends = None if until is None else checked_time("until", until)
        if replaces is not None:
            await self._known(_id(replaces))
        now = self._desk.now()
        parts = {"subject": subject, "relation": relation, "value": value}
        data: dict[str, Any] = self._parts(parts, relation)
        data |= {"model": "", "prompt": _BY_HAND}
        if pinned:
            data["pinned"] = True
        record = await self._write(self._desk.new_id(), sentence, data, now)
        move = Move(
            "add" if replaces is None else "supersede",
            now,
            record,
            frozenset[str]() if replaces is None else frozenset({_id(replaces)}),
            key_of(subject, relation),
            since=begins,
            until=ends,
            by_hand=True,
        )
        await self._decided(move)
        made = {one.id: one for one in await self._records()}
        known = Known((one.id, one.text) for one in made.values() if one.live).find(sentence)
        return fact_of(made[record.id if record.id in made or known is None else known])

    @checked
    async def edit(
        self,
        fact: Fact | str,
        text: str | None = None,
        *,
        subject: str | None = None,
        relation: str | None = None,
        value: str | None = None,
    ) -> Fact:
        """Correct a fact in its place: id, validity and sources stay.

        Args:
            fact: Which.
            text: The new sentence; default the old one.
            subject: See `add`; default the old one. Likewise the others.
            relation: See `add`.
            value: See `add`.

        Returns:
            The fact as it is now.

        Raises:
            ConfigurationError: It is not known, or the text is empty.
        """
        old = await self._known(_id(fact))
        sentence = old.text if text is None else self._sentence(text)
        given = {"subject": subject, "relation": relation, "value": value}
        named = relation if relation is not None else old.data.get("relation", "")
        changed = self._parts({name: part for name, part in given.items() if part is not None}, named)
        data = {**old.data, **changed, "model": "", "prompt": _BY_HAND}
        record = await self._write(old.id, sentence, data, old.said_at or old.created_at)

        def merge(records: Sequence[Record]) -> Changes:
            return Changes(revise=tuple(record for one in records if not one.data.get("deleted")))

        await self._desk.change(merge, Reads(ids=(old.id,)))
        return fact_of(await self._known(old.id))

    @checked
    async def pin(self, fact: Fact | str, pinned: bool = True) -> Fact:
        """Keep a fact whatever a model proposes and however many facts there are, or no longer.

        Args:
            fact: Which.
            pinned: Pin it, or let it loose.

        Returns:
            The fact as it is now.

        Raises:
            ConfigurationError: It is not known.
        """
        return await self._amended(_id(fact), {"pinned": True} if pinned else {}, without=("pinned",))

    @checked
    async def confirm(self, fact: Fact | str) -> Fact:
        """Note that a fact is still true.

        Args:
            fact: Which.

        Returns:
            The fact as it is now.

        Raises:
            ConfigurationError: It is not known.
        """
        return await self._amended(_id(fact), {"confirmed_at": self._desk.now().isoformat()})

    @checked
    async def retract(self, fact: Fact | str, *, at: datetime | None = None) -> Fact:
        """End a fact that no longer holds; it stays as history.

        Args:
            fact: Which.
            at: Since when it does not hold; naive means UTC; default now.

        Returns:
            The fact as it is now.

        Raises:
            ConfigurationError: It is not known.
        """
        since = None if at is None else checked_time("at", at)
        await self._known(_id(fact))
        await self._decided(
            Move("retract", self._desk.now(), targets=frozenset({_id(fact)}), since=since, by_hand=True)
        )
        return fact_of(await self._known(_id(fact)))

    @checked
    async def delete(self, fact: Fact | str) -> Fact | None:
        """Remove a fact, its other wordings, and what it says; its place in the history of others closes.

        Args:
            fact: Which.

        Returns:
            The fact as it was; `None` when there is none.
        """
        records = {record.id: record for record in await self._records()}
        old = records.get(_id(fact))
        if old is None:
            return None
        gone = {old.id} | {
            one.id for one in records.values() if one.superseded_by == old.id and not one.data.get("ended_by")
        }

        def merge(_: Sequence[Record]) -> Changes:
            empty = tuple(NewRecord(one, _KIND, data={"deleted": True}) for one in sorted(gone))
            return Changes(revise=empty, archive=tuple(sorted(gone)))

        await self._desk.change(merge)
        return fact_of(old)

    # -- inside ----------------------------------------------------------------------------------------------

    async def _records(self) -> list[Record]:
        """All facts but deleted ones, those that are over as well."""
        records = await (await self._desk.reader()).records(_KIND, past=True)
        return [record for record in records if not record.data.get("deleted")]

    async def _one(self, id_: str) -> Record | None:
        return next((record for record in await self._records() if record.id == id_), None)

    async def _known(self, id_: str) -> Record:
        found = await self._one(id_)
        if found is None:
            raise ConfigurationError(
                f"fact={id_!r:.100} was given.",
                allowed="It is a Fact of this memory's owner, or the id of one.",
                remedy="Look it up with all(), as_of() or history().",
            )
        return found

    def _parts(self, given: Mapping[str, str], relation: str) -> dict[str, Any]:
        """Parts of a fact without secrets; a relation such as "password" makes the value one."""
        parts: dict[str, Any] = {name: self._desk.redacted(part) for name, part in given.items()}
        if parts.get("value"):
            (parts["value"],) = self._desk.redacted_fields({relation: given["value"]}).values()
        return parts

    def _sentence(self, text: str) -> str:
        sentence = " ".join(text.split()) if isinstance(text, str) else ""
        if not sentence:
            raise ConfigurationError(
                f"text={text!r:.100} was given.",
                allowed="A fact is a sentence.",
                remedy="Write one, or call delete() to remove a fact.",
            )
        return self._desk.redacted(sentence)

    async def _write(self, id_: str, text: str, data: Mapping[str, Any], when: datetime) -> NewRecord:
        return await self._writer.written(id_, text, data, when, self._desk.counter, self._desk.scope)

    async def _decided(self, move: Move) -> Changes:
        def merge(records: Sequence[Record]) -> Changes:
            outcome = decide([move], records)
            return Changes(
                add=(*outcome.current, *outcome.past),
                supersede=outcome.superseded,
                archive=outcome.archived,
                amend=outcome.amended,
            )

        return await self._desk.change(merge, Reads(kinds=(_KIND,), past=True))

    async def _amended(self, id_: str, more: Mapping[str, Any], *, without: Sequence[str] = ()) -> Fact:
        await self._known(id_)

        def merge(records: Sequence[Record]) -> Changes:
            amended = {}
            for one in records:
                kept = {name: value for name, value in one.data.items() if name not in without}
                amended[one.id] = Amendment({**kept, **more}, one.expires_at)
            return Changes(amend=amended)

        await self._desk.change(merge, Reads(ids=(id_,)))
        return fact_of(await self._known(id_))


def _id(fact: Fact | str) -> str:
    return fact.id if isinstance(fact, Fact) else fact
