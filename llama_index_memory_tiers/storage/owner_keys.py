"""Names of owners: `u:<user>`, `s:<session row>`, `a:<agent>`; equal text means equal owner, by character."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import String, cast, literal

from llama_index_memory_tiers.records import Scope

_USER, _SESSION, _AGENT = "u:", "s:", "a:"


def user_key(user_id: str) -> str:
    """The owner of what is known about a person."""
    return f"{_USER}{user_id}"


def session_key(sid: int) -> str:
    """The owner of what belongs to one session, by its private row."""
    return f"{_SESSION}{sid}"


def agent_key(agent_id: str) -> str:
    """The owner of what an agent may tell all its users."""
    return f"{_AGENT}{agent_id}"


def session_keys(sid: Any) -> Any:
    """The same as `session_key`, for a column of a statement."""
    return literal(_SESSION) + cast(sid, String)


def user_of(owner: str) -> str | None:
    """Whose memories an owner's are; `None` for those of a session or an agent."""
    return owner.removeprefix(_USER) if owner.startswith(_USER) else None


def session_of(owner: str) -> int | None:
    """The private row of the session that an owner is; `None` for a person or an agent."""
    return int(owner.removeprefix(_SESSION)) if owner.startswith(_SESSION) else None


def owner_key(scope: Scope, sid: int, *, per_session: bool = False) -> str:
    """Name the owner of what is learnt in a session.

    Args:
        scope: Whose session.
        sid: Its private row.
        per_session: Keep it to this session even though there is a user.

    Returns:
        The user's key, or that of the session.
    """
    return user_key(scope.user_id) if scope.user_id is not None and not per_session else session_key(sid)


def owner_keys(user_id: str, sids: Iterable[int]) -> set[str]:
    """Keys of a person, when there is one, and of sessions."""
    own = {session_key(sid) for sid in sids}
    return own | {user_key(user_id)} if user_id else own
