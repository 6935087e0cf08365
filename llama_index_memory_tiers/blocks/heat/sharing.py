"""Sharing: which of an agent's statements it may tell all its users, decided by an explicit policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llama_index_memory_tiers.blocks.heat.promotion import AGENT, contradicts, importance, said, side
from llama_index_memory_tiers.records import NewRecord, Record, Scope
from llama_index_memory_tiers.sameness import same_note, words
from llama_index_memory_tiers.text import analyse

_PERSON = "user 用户"
_ITSELF = "assistant agent 助手"
_JOINTS = re.compile(r"[_.,:/]")  # of an id such as will_smith
_NAME = re.compile(r"(?<=[^.!?\s]\s)\w+")  # not the first word of a sentence


@dataclass(frozen=True, slots=True)
class AgentStatement:
    """Something that an agent learnt about itself, as a share policy sees it.

    Args:
        text: The whole sentence.
        subject: Whom or what it is about, or ''.
        relation: How subject and value belong together, or ''.
        value: The rest, or ''.
        importance: 0 to 1.
        agent_id: The agent.
        user_id: In whose conversation it was said; `None` when nobody is named.
        names_user: Whether it speaks of the user: by the word "user", by their id, by anything that knowledge about
            them is about, or by a name in it or in their profile, which is a word with a capital letter within a
            sentence.
    """

    text: str
    subject: str
    relation: str
    value: str
    importance: float
    agent_id: str
    user_id: str | None
    names_user: bool


SharePolicy = Literal["unnamed"] | Callable[[AgentStatement], bool]
"""`unnamed` shares what does not speak of the user; a callable decides for each statement."""


def approved(
    notes: Sequence[NewRecord],
    policy: SharePolicy | None,
    scope: Scope,
    known: Iterable[Record | NewRecord],
    failed: Callable[[Exception], None],
) -> list[NewRecord]:
    """Mark the statements of an agent that it may tell all its users.

    Args:
        notes: What was learnt.
        policy: Decides; `None` shares nothing.
        scope: In whose conversation.
        known: What is known of the user: knowledge, profiles.
        failed: Told when the policy raised; then the statement stays with its user.

    Returns:
        The notes, in the same order.
    """
    if policy is None or scope.agent_id is None:
        return list(notes)
    known = list(known)
    own = [note for note in notes if side(note) == f"{AGENT}/{scope.agent_id}"]
    about = [str(one.data.get("subject", "")) for one in known]
    named = [name for one in known for name in _NAME.findall(one.text) if name[0].isupper() and len(name) > 1]
    names = _words(" ".join((*about, *named, scope.user_id or "", _PERSON))) - _words(_ITSELF)
    chosen = {note.id for note in own if _shares(_statement(note, scope, names), policy, failed)}
    return [replace(note, data={**note.data, "shared": True}) if note.id in chosen else note for note in notes]


def _shares(statement: AgentStatement, policy: SharePolicy, failed: Callable[[Exception], None]) -> bool:
    if policy == "unnamed":
        return not statement.names_user
    try:
        return policy(statement) is True
    except Exception as error:  # noqa: BLE001  # a policy may raise anything; then nothing is shared
        failed(error)
        return False


def _words(text: str) -> set[str]:
    """Terms, and the words as they are, as a name may be a word that says nothing elsewhere."""
    said = words(_JOINTS.sub(" ", text))
    return {*analyse(text), *(word for word in said if word.isascii() and word[0].isalnum())}


def _statement(note: NewRecord, scope: Scope, names: Collection[str]) -> AgentStatement:
    fields: Mapping[str, str] = {name: str(note.data.get(name, "")) for name in ("subject", "relation", "value")}
    return AgentStatement(
        text=note.text,
        **fields,
        importance=importance(note),
        agent_id=scope.agent_id or "",
        user_id=scope.user_id,
        names_user=not _words(" ".join((note.text, *fields.values()))).isdisjoint(names),
    )


def granted(records: Iterable[NewRecord]) -> dict[str, tuple[str, ...]]:
    """Agent → ids of the records that it may tell all its users."""
    found: dict[str, tuple[str, ...]] = {}
    for record in records:
        agent = record.data.get("agent")
        if agent and record.data.get("shared") is True:
            found[agent] = (*found.get(agent, ()), record.id)
    return found


def distinct(records: Iterable[Record]) -> set[str]:
    """Ids of those that are left when what others said newer, or in the same words, counts alone.

    Args:
        records: Knowledge of several owners.

    Returns:
        Public ids.
    """
    kept: list[Record] = []
    for one in sorted(records, key=said, reverse=True):
        if not any(same_note(one.text, other.text) or contradicts(one, other) for other in kept):
            kept.append(one)
    return {one.id for one in kept}
