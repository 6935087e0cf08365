"""Ids as people type them: whole, or the first characters of just one."""

from __future__ import annotations

from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.memory import TieredMemory

_MOST_NAMES = 10
LEAST = 4
"""Shorter ones are taken for whole ids: a slip of the finger must not name a memory."""


async def whole_id(memory: TieredMemory, typed: str) -> str | None:
    """The id that was meant.

    Args:
        memory: Whose.
        typed: A whole id, or four or more of its first characters.

    Returns:
        The id of a message or record of the memory's owner; `None` when none is or begins like that.

    Raises:
        ConfigurationError: Several begin like that.
    """
    user = memory.user_id or ""
    session = None if memory.user_id is not None else memory.session_id
    found = await memory.storage.survey.beginning(typed, user, session, at_most=_MOST_NAMES + 1)
    if any(known == typed for known, _ in found):
        return typed
    if len(typed) < LEAST:
        return None
    if len(found) > 1:
        more = " and more" if len(found) > _MOST_NAMES else ""
        listed = ", ".join(f"{known} ({kind})" for known, kind in found[:_MOST_NAMES])
        raise ConfigurationError(
            f"The id {typed!r:.100} was given.",
            allowed=f"It is an id, or the beginning of just one. So begin: {listed}{more}.",
            remedy="Write more of it.",
        )
    return found[0][0] if found else None


async def known_id(memory: TieredMemory, typed: str) -> str:
    """See `whole_id`.

    Raises:
        ConfigurationError: None or several are or begin like that.
    """
    found = await whole_id(memory, typed)
    if found is None:
        raise ConfigurationError(
            no_such_id(memory, typed),
            allowed=f"It is a whole id, or at least the first {LEAST} characters of one.",
            remedy="Take one from `memory-tiers search`.",
        )
    return found


def no_such_id(memory: TieredMemory, typed: str) -> str:
    """Say that an id is nobody's here."""
    return f"No message or record of {whose(memory)} begins with {typed!r:.100}."


def whose(memory: TieredMemory) -> str:
    """Whose a memory is, in words."""
    return f"user {memory.user_id!r}" if memory.user_id is not None else f"session {memory.session_id!r}"


def place(memory: TieredMemory, scope: str | None) -> str:
    """See `whose`, with the session when only that is meant."""
    whole = memory.user_id is None or scope != "session"
    return whose(memory) if whole else f"{whose(memory)}, session {memory.session_id!r}"
