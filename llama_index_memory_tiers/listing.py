"""Everything that is kept for one memory, as rows of one table."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from llama_index_memory_tiers.errors import MissingExtraError
from llama_index_memory_tiers.provenance import speaker_of, state_of
from llama_index_memory_tiers.records import Record, Scope, StoredMessage
from llama_index_memory_tiers.storage import Storage

COLUMNS = (
    "id", "kind", "place", "state", "session_id", "by", "text", "said_at", "created_at", "expires_at", "tokens",
    "sources",
)  # fmt: skip
"""Columns of the table; `place` is `window` or `archive` for messages, the block's key for records."""


async def list_kept(storage: Storage, scope: Scope) -> list[dict[str, Any]]:
    """List messages and records of a memory's owner.

    Args:
        storage: Where.
        scope: Whose; with a user all sessions and what was learnt from them, else this session.

    Returns:
        One row per message, then one per record, with the keys `COLUMNS`. A record that only refers to a message,
        as those of the vector block do, shows its text.
    """
    user, session = scope.user_id or "", None if scope.user_id is not None else scope.session_id
    messages = await storage.survey.messages(user, session)
    places = {message.place: message for message in messages}
    found = [_message_row(message) for message in messages]
    now = storage.clock()
    for _, record in await storage.survey.records(user, session):
        sources = [places[place] for place in record.sources if place in places]
        found.append(_record_row(record, sources, state_of(record, now)))
    return found


def data_frame(rows: Sequence[dict[str, Any]]) -> Any:
    """Make a pandas DataFrame.

    Args:
        rows: From `list_kept`.

    Returns:
        The frame, with the columns `COLUMNS`.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise MissingExtraError(
            "to_dataframe() was called, but pandas is not installed.",
            allowed="A DataFrame is made by pandas, which nothing else here needs.",
            remedy="Run: pip install 'llama-index-memory-tiers[pandas]', or use alist(), which returns plain rows.",
        ) from None
    return pandas.DataFrame(rows, columns=list(COLUMNS))


def _message_row(message: StoredMessage) -> dict[str, Any]:
    return {
        "id": message.id,
        "kind": "message",
        "place": "window" if message.status.value == "active" else "archive",
        "state": "live",
        "session_id": message.session_id,
        "by": speaker_of(message),
        "text": message.text,
        "said_at": message.created_at,
        "created_at": message.created_at,
        "expires_at": None,
        "tokens": message.tokens,
        "sources": [],
    }


def _record_row(record: Record, sources: Sequence[StoredMessage], state: str) -> dict[str, Any]:
    text = record.text or ("\n".join(message.text for message in sources) if record.kind == "message" else "")
    sessions = list(dict.fromkeys(message.session_id for message in sources))
    return {
        "id": record.id,
        "kind": record.kind,
        "place": record.block,
        "state": state,
        "session_id": sessions[0] if len(sessions) == 1 else None,
        "by": record.block,
        "text": text,
        "said_at": record.said_at,
        "created_at": record.created_at,
        "expires_at": record.expires_at,
        "tokens": record.tokens,
        "sources": [message.id for message in sources],
    }
