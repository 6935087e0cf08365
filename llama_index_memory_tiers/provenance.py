"""Where a memory comes from: the messages behind a record, the records behind a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from llama_index_memory_tiers.display import Grid, Shown
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.records import Record, Scope, StoredMessage, nothing
from llama_index_memory_tiers.storage import Storage

_TEXT_CHARS = 200


@dataclass(frozen=True, slots=True)
class SourceView:
    """One message behind a record, or one record made from a message.

    Args:
        id: Public id.
        kind: `message`, or the kind of the record.
        by: Who said it, or the key of the block that wrote it.
        session_id: Of a message.
        at: When it was said or written.
        text: What it says.
    """

    id: str
    kind: str
    by: str
    session_id: str
    at: datetime
    text: str


@dataclass(frozen=True, slots=True)
class Provenance(Shown):
    """Where something that is kept comes from, and what came from it.

    Args:
        id: Its public id.
        kind: `message`, or the kind of the record.
        by: Who said it, or the key of the block that wrote it.
        text: What it says.
        at: When it was said or written.
        state: `live`, `superseded`, `put aside` or `expired`; of a message `active` or `archived`.
        sources: The messages it came from, in order.
        derived: The records that came from it.
        about: Fields of its kind: the model and the prompt that wrote it, what replaced it.
    """

    id: str
    kind: str
    by: str
    text: str
    at: datetime
    state: str
    sources: tuple[SourceView, ...] = ()
    derived: tuple[SourceView, ...] = ()
    about: Mapping[str, Any] = field(default_factory=nothing)

    def _grids(self) -> Sequence[Grid]:
        head = f"{self.kind} {self.id}\n{self.text}"
        rows = [("by", self.by), ("at", f"{self.at:%Y-%m-%d %H:%M}"), ("state", self.state)]
        rows += [(name, value) for name, value in self.about.items() if value not in (None, "")]
        grids = [Grid(("field", "value"), rows, head)]
        heads = ("id", "kind", "by", "session", "at", "text")
        for title, views in (("comes from", self.sources), ("what came from it", self.derived)):
            if views:
                cells = [
                    (v.id, v.kind, v.by, v.session_id, f"{v.at:%Y-%m-%d %H:%M}", v.text[:_TEXT_CHARS]) for v in views
                ]
                grids.append(Grid(heads, cells, title))
        return grids


async def explain_origin(storage: Storage, scope: Scope, id: str) -> Provenance:  # noqa: A002  # the field's word
    """Say where a message or record of a memory's owner comes from.

    Args:
        storage: Where.
        scope: Whose; with a user all sessions, else this session.
        id: Public id of a message or record.

    Returns:
        Its sources, and what came from it.

    Raises:
        ConfigurationError: There is nothing with this id in the scope.
    """
    user, session = scope.user_id or "", None if scope.user_id is not None else scope.session_id
    for owner, record in await storage.survey.records(user, session, [id]):
        sources = await storage.log.at(owner, record.sources)
        return _of_record(record, sources, storage.clock())
    for message in await storage.survey.messages(user, session, [id]):
        derived = await storage.survey.derived(user, message.place)
        return _of_message(message, [record for _, record in derived])
    raise ConfigurationError(
        f"id={id!r:.100} was given.",
        allowed="It is the id of a message or record that is kept for this user, or without a user for this session.",
        remedy="Take one from amessages(), arecall(), to_dataframe() or `memory-tiers search`.",
    )


def state_of(record: Record, now: datetime) -> str:
    """What became of a record."""
    if record.superseded_by is not None:
        return "superseded"
    if record.archived_at is not None:
        return "put aside"
    return "expired" if record.expires_at is not None and record.expires_at <= now else "live"


def speaker_of(message: StoredMessage) -> str:
    """Who said a message."""
    return message.meta.sent_from or message.role.value


def _of_record(record: Record, sources: Sequence[StoredMessage], now: datetime) -> Provenance:
    said = "\n".join(message.text for message in sources) if record.kind == "message" else record.text
    return Provenance(
        id=record.id,
        kind=record.kind,
        by=record.block,
        text=said,
        at=record.said_at or record.created_at,
        state=state_of(record, now),
        sources=tuple(_message_view(message) for message in sources),
        about={
            "written at": f"{record.created_at:%Y-%m-%d %H:%M}",
            "model": record.data.get("model"),
            "prompt": record.data.get("prompt"),
            "replaced by": record.superseded_by,
        },
    )


def _of_message(message: StoredMessage, records: Sequence[Record]) -> Provenance:
    derived = [
        SourceView(record.id, record.kind, record.block, "", record.said_at or record.created_at, record.text)
        for record in records
    ]
    return Provenance(
        id=message.id,
        kind="message",
        by=speaker_of(message),
        text=message.text,
        at=message.created_at,
        state=message.status.value,
        derived=tuple(derived),
        about={"session": message.session_id, "cause": message.meta.cause_by, "tokens": message.tokens},
    )


def _message_view(message: StoredMessage) -> SourceView:
    return SourceView(message.id, "message", speaker_of(message), message.session_id, message.created_at, message.text)
