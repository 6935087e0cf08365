"""What models and extractors propose about facts becomes moves that code decides about."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from llama_index_memory_tiers.blocks.facts.changes import Move, key_of
from llama_index_memory_tiers.checks import check_fields
from llama_index_memory_tiers.dates import begins, ends, with_dates
from llama_index_memory_tiers.errors import ConfigurationError, ExtractionError
from llama_index_memory_tiers.extraction.facts import MAX_FACT_CHARS, FactDraft
from llama_index_memory_tiers.moments import aware
from llama_index_memory_tiers.records import NewRecord, Place, StoredMessage
from llama_index_memory_tiers.text import analyse

_HEARD_CHARS = 20_000  # of a message; as much as a model is shown

Change = Literal["add", "supersede", "retract"]


@dataclass(frozen=True, slots=True)
class FactProposal:
    """What your own extractor says about facts.

    Args:
        text: The whole sentence; left out, it is subject, relation and value.
        subject: Whom or what it is about.
        relation: How subject and value belong together.
        value: The rest.
        action: `add` it; let it `supersede` the current facts of the same subject and relation; or `retract` those,
            with this value if one is given.
        since: From when it holds, or from when a retracted one does not: a time (naive is UTC), or words such as
            `last Friday`; default when it was said.
        until: When it ends, likewise.
        said: Ids of the messages that say it; default all that the extractor was given.

    Raises:
        ConfigurationError: The action is none of these, or there is nothing that it could be about.
    """

    text: str = ""
    subject: str = ""
    relation: str = ""
    value: str = ""
    action: Change = "add"
    since: str | datetime | None = None
    until: str | datetime | None = None
    said: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        keyed = any(key_of(self.subject, self.relation))
        if keyed or (self.action == "add" and self.text.strip()):
            return
        raise ConfigurationError(
            f"FactProposal action={self.action!r:.40} with subject={self.subject!r:.40}, "
            f"relation={self.relation!r:.40} was given.",
            allowed="'add' needs a text, or subject and relation; 'supersede' and 'retract' need subject and relation.",
            remedy="Fill them in.",
        )


Extractor = Callable[[list[StoredMessage]], Iterable[FactProposal] | Awaitable[Iterable[FactProposal]]]
"""Your own extractor, sync or async: messages of a batch → proposals."""

MakeRecord = Callable[[FactDraft, Sequence[Place]], NewRecord]


async def ask_extractor(extractor: Extractor, messages: Sequence[StoredMessage]) -> list[FactProposal]:
    """Call a user's extractor; one that is no coroutine runs in a thread.

    Args:
        extractor: The callable.
        messages: The batch.

    Returns:
        Its proposals.

    Raises:
        ExtractionError: It returned something else.
    """
    given = list(messages)
    if inspect.iscoroutinefunction(extractor):
        found: Any = await extractor(given)
    else:
        found = await asyncio.to_thread(extractor, given)
        if inspect.isawaitable(found):
            found = await found
    proposals = list(found or ())
    for proposal in proposals:
        if not isinstance(proposal, FactProposal):
            raise ExtractionError(
                f"The extractor returned a {type(proposal).__name__}.",
                allowed="It returns FactProposals, or nothing.",
                remedy="Wrap what it finds in FactProposal(text=…).",
            )
    return proposals


def moves_of_proposals(
    proposals: Iterable[FactProposal], messages: Sequence[StoredMessage], make: MakeRecord
) -> list[Move]:
    """Moves for what an extractor proposes.

    Args:
        proposals: From `ask_extractor`.
        messages: What it was given; not empty.
        make: Writes a record.

    Returns:
        The moves.
    """
    moves, heard = [], _heard(messages)
    for proposal in proposals:
        cited = [message for message in messages if message.id in proposal.said] or list(messages)
        said_at = max(message.created_at for message in cited)
        sources = tuple(message.place for message in cited)
        since, until = _moment(proposal.since, said_at, begins), _moment(proposal.until, said_at, ends)
        key = key_of(proposal.subject, proposal.relation)
        if proposal.action == "retract":
            moves.append(
                Move("retract", said_at, None, None, key, value=proposal.value, since=since or until, sources=sources)
            )
            continue
        subject, relation, value = (" ".join(part.split()) for part in _parts(proposal))
        text = _sentence(proposal.text or f"{subject} {relation} {value}", said_at)
        draft = FactDraft(subject, relation, value, text, said_at)
        sources = _sources(draft, sources, heard)
        record = make(draft, sources)
        targets = None if proposal.action == "supersede" else frozenset[str]()
        moves.append(Move(proposal.action, said_at, record, targets, key, "", since, until, sources))
    return moves


def moves_of_drafts(
    drafts: Iterable[FactDraft], lines: Sequence[StoredMessage], ids: Mapping[int, str], make: MakeRecord
) -> list[Move]:
    """Moves for what a model proposes.

    Args:
        drafts: What was read in its answer.
        lines: The messages behind the line numbers.
        ids: Number of a known fact → its id; every other number was invented.
        make: Writes a record.

    Returns:
        The moves.
    """
    moves, heard = [], _heard(lines)
    for draft in drafts:
        cited = [lines[number - 1] for number in draft.sources]
        newest = max(cited, key=lambda line: line.created_at)
        said_at = newest.created_at
        sources = tuple(line.place for line in cited)
        since, until = begins(draft.since, said_at), ends(draft.until, said_at)
        key = key_of(draft.subject, draft.relation)
        for action, numbers in (("retract", draft.retracts), ("confirm", draft.confirms)):
            targets = frozenset(ids[number] for number in numbers if number in ids)
            if targets:
                at = since or until if action == "retract" else None
                moves.append(Move(action, said_at, None, targets, key, since=at, sources=sources))  # type: ignore[arg-type]  # one of two literals
        if draft.retracts or draft.confirms:
            continue
        sources = _sources(draft, sources, heard)
        record = make(_dated(draft, said_at), sources)
        targets = frozenset(ids[number] for number in draft.replaces if number in ids)
        moves.append(Move("supersede" if targets else "add", said_at, record, targets, key, "", since, until, sources))
    return moves


def _heard(lines: Sequence[StoredMessage]) -> dict[Place, AbstractSet[str]]:
    return {line.place: analyse(line.text[:_HEARD_CHARS]).keys() for line in lines}


def _sources(draft: FactDraft, cited: tuple[Place, ...], heard: Mapping[Place, AbstractSet[str]]) -> tuple[Place, ...]:
    """Where a fact comes from: what is cited, and when that has no word of it, also the lines that have one.

    Forgetting one of these then reaches a fact whose sources a model has confused. A fact in words that nobody used,
    as after a translation, keeps what is cited.
    """
    words = analyse(draft.value).keys() or analyse(draft.text).keys() - analyse(draft.subject).keys()
    if any(words & heard[place] for place in cited):
        return cited
    return tuple(dict.fromkeys((*cited, *(place for place, said in heard.items() if words & said))))


def _parts(proposal: FactProposal) -> tuple[str, str, str]:
    return proposal.subject, proposal.relation, proposal.value


def _dated(draft: FactDraft, said_at: datetime) -> FactDraft:
    return FactDraft(draft.subject, draft.relation, draft.value, _sentence(draft.text, said_at), said_at)


def _sentence(text: str, said_at: datetime) -> str:
    one_line = " ".join(text.split())
    cut = one_line if len(one_line) <= MAX_FACT_CHARS else f"{one_line[:MAX_FACT_CHARS]}…"
    return with_dates(cut, said_at)


def _moment(
    given: str | datetime | None, said_at: datetime, read: Callable[[str, datetime], datetime | None]
) -> datetime | None:
    if isinstance(given, datetime):
        return aware(given)
    return read(given, said_at) if given else None
