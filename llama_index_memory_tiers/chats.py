"""A chat with questions about it, read from JSON Lines or from an export of ChatGPT."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from llama_index_memory_tiers.checks import check_fields, checked
from llama_index_memory_tiers.errors import ConfigurationError

ROLES = ("user", "assistant", "system")
_BEGIN = datetime(2025, 1, 1, tzinfo=timezone.utc)
_SHAPES = (
    "A chat is JSON Lines with role and text (optional: speaker, said_at, session, user, id) or question "
    "(optional: answer, evidence, category, language, user), or ChatGPT's conversations.json."
)


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a chat.

    Args:
        id: Unique in the chat.
        text: What was said.
        role: `user`, `assistant` or `system`; default `user`.
        speaker: Name of who said it; default '', unknown.
        said_at: When it was said; naive means UTC; default the beginning of 2025.
        session: The conversation it was said in; default all in one.
        user: Whose memory it belongs to; default everything is one user's.
    """

    id: str
    text: str
    role: str = "user"
    speaker: str = ""
    said_at: datetime = _BEGIN
    session: str = "chat"
    user: str = "you"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class RecallQuestion:
    """One question about a user's chat.

    Args:
        text: What is asked.
        evidence: Ids of the messages that together hold the answer.
        category: A word of your own by which questions are grouped; default '', none.
        user: Whose chat it asks about.
        language: Such as `en` or `zh`; default '', unknown.
        answer: A short phrase; default '', when only the evidence counts.
    """

    text: str
    evidence: tuple[str, ...] = ()
    category: str = ""
    user: str = "you"
    language: str = ""
    answer: str = ""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages and questions about them.

    Args:
        name: For people.
        messages: Each session's in order.
        questions: Asked afterwards.
    """

    name: str
    messages: tuple[ChatTurn, ...]
    questions: tuple[RecallQuestion, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def users(self) -> tuple[str, ...]:
        """Everybody who has messages, in the order of their first one."""
        return tuple(dict.fromkeys(message.user for message in self.messages))

    @checked
    def sessions(self, user: str) -> list[list[ChatTurn]]:
        """One list of messages per session, in the order in which the sessions began."""
        found: dict[str, list[ChatTurn]] = {}
        for message in self.messages:
            if message.user == user:
                found.setdefault(message.session, []).append(message)
        return list(found.values())

    @checked
    def texts(self, ids: Sequence[str]) -> list[str]:
        """What the messages with these ids say."""
        wanted = set(ids)
        return [message.text for message in self.messages if message.id in wanted]


@checked
def read_chat_file(path: str | os.PathLike[str]) -> Chat:
    """Read somebody's own chat.

    Each line of JSON Lines is a message, `{"role": "user", "text": "…", "id": "a1"}`, with `speaker`, `said_at` (ISO
    8601, or seconds since 1970), `session` and `user` as you have them; or a question, `{"question": "…", "evidence":
    ["a1"]}`, with `category`, `language`, `answer` and `user`. An export of ChatGPT has no questions.

    Args:
        path: JSON Lines, or ChatGPT's `conversations.json`, in UTF-8.

    Returns:
        The chat. Messages without an id are called by their line, as in `line-7`; those without a time were said
        a minute after the one before.

    Raises:
        ConfigurationError: The file cannot be read; names the line and what is wrong with it.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"The chat {str(path)!r} cannot be read: {error}.", allowed=_SHAPES, remedy="Pass such a file, in UTF-8."
        ) from error
    export = _export_of(text)
    if export is None:
        messages, questions = _Lines(path).read(text)
    else:
        messages, questions = _exported(export, path), ()
    if not messages:
        raise _wrong(path, None, "it has no messages")
    return Chat(path.name, messages, questions)


def _wrong(path: Path, line: int | None, why: str) -> ConfigurationError:
    where = str(path) if line is None else f"{path}, line {line}"
    return ConfigurationError(f"{where}: {why}.", allowed=_SHAPES, remedy="Correct the file and start again.")


def _moment(value: Any) -> datetime | None:
    """An aware time from ISO 8601 or from seconds since 1970; `None` when it is neither."""
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, timezone.utc)
        moment = datetime.fromisoformat(value.replace("Z", "+00:00"))
    except (AttributeError, OSError, OverflowError, ValueError):
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)


# --- JSON Lines -------------------------------------------------------------------------------------------------


class _Lines:
    """Reads JSON Lines; an error names the line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._messages: list[ChatTurn] = []
        self._ids: set[str] = set()

    def read(self, text: str) -> tuple[tuple[ChatTurn, ...], tuple[RecallQuestion, ...]]:
        rows = list(self._rows(text))
        for number, row in rows:
            if "question" not in row:
                self._take_message(number, row)
        asked = tuple(self._question(number, row) for number, row in rows if "question" in row)
        return tuple(self._messages), asked

    def _rows(self, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        # not splitlines(): it would also split at U+2028 and its like, which JSON allows inside a string
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise _wrong(self._path, number, f"it is no JSON ({error.msg}, column {error.colno})") from None
            if not isinstance(row, dict):
                raise _wrong(self._path, number, f"it holds {type(row).__name__}, not an object")
            yield number, row

    def _text(self, number: int, row: Mapping[str, Any], *names: str, default: str | None = None) -> str:
        for name in names:
            value = row.get(name)
            if value is None:
                continue
            if isinstance(value, int) and not isinstance(value, bool) and name in {"id", "session", "user"}:
                value = str(value)
            if not isinstance(value, str) or not value.strip():
                raise _wrong(self._path, number, f"{name}={value!r:.60} is no text")
            return value
        if default is None:
            raise _wrong(self._path, number, f"{' or '.join(names)} is missing")
        return default

    def _take_message(self, number: int, row: Mapping[str, Any]) -> None:
        role = self._text(number, row, "role")
        if role not in ROLES:
            raise _wrong(self._path, number, f"role={role!r:.60} is none of {', '.join(ROLES)}")
        name = self._text(number, row, "id", default=f"line-{number}")
        if name in self._ids:
            raise _wrong(self._path, number, f"id={name!r:.60} was used before")
        self._ids.add(name)
        self._messages.append(
            ChatTurn(
                id=name,
                user=self._text(number, row, "user", default="you"),
                session=self._text(number, row, "session", default="chat"),
                role=role,
                speaker=self._text(number, row, "speaker", default=""),
                said_at=self._said_at(number, row),
                text=self._text(number, row, "text", "content"),
            )
        )

    def _said_at(self, number: int, row: Mapping[str, Any]) -> datetime:
        if row.get("said_at") is None:
            # A minute after the line before; a chat without any time begins in 2025.
            return self._messages[-1].said_at + timedelta(minutes=1) if self._messages else _BEGIN
        moment = _moment(row["said_at"])
        if moment is None:
            raise _wrong(self._path, number, f"said_at={row['said_at']!r:.60} is no time such as 2025-01-06T07:53:04Z")
        return moment

    def _question(self, number: int, row: Mapping[str, Any]) -> RecallQuestion:
        users = list(dict.fromkeys(message.user for message in self._messages))
        user = self._text(number, row, "user", default=users[0] if len(users) == 1 else None)
        if user not in users:
            raise _wrong(self._path, number, f"user={user!r:.60} has no messages")
        evidence = row.get("evidence", ())
        evidence = [evidence] if isinstance(evidence, str) else evidence
        if not isinstance(evidence, list | tuple):
            raise _wrong(self._path, number, f"evidence={evidence!r:.60} is no list of ids")
        for name in evidence:
            if not isinstance(name, str) or name not in self._ids:
                raise _wrong(self._path, number, f"evidence names {name!r:.60}, which no message has as its id")
        text = self._text(number, row, "question")
        return RecallQuestion(
            text=text,
            evidence=tuple(evidence),
            category=self._text(number, row, "category", default=""),
            user=user,
            language=self._text(number, row, "language", default=""),
            answer=self._text(number, row, "answer", default=""),
        )


# --- ChatGPT's export -------------------------------------------------------------------------------------------


def _export_of(text: str) -> list[Any] | None:
    """The conversations of an export, or `None` when the text is something else."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        return None
    if isinstance(whole, dict) and "mapping" in whole:
        return [whole]
    return whole if isinstance(whole, list) else None


def _exported(conversations: Sequence[Any], path: Path) -> tuple[ChatTurn, ...]:
    for number, conversation in enumerate(conversations, 1):
        if not isinstance(conversation, dict) or not isinstance(conversation.get("mapping"), dict):
            raise _wrong(path, None, f"conversation {number} has no mapping of messages")
    # The export begins with the newest.
    ordered = sorted(enumerate(conversations), key=lambda each: (_began(each[1]), -each[0]))
    messages: list[ChatTurn] = []
    for number, (_, conversation) in enumerate(ordered, 1):
        messages += _conversation(conversation, number)
    return tuple(messages)


def _began(conversation: Mapping[str, Any]) -> datetime:
    return _moment(conversation.get("create_time")) or _BEGIN


def _conversation(conversation: Mapping[str, Any], number: int) -> Iterator[ChatTurn]:
    session = f"{number} {conversation.get('title') or 'untitled'}"
    before = _began(conversation)
    for at, message in enumerate(_branch(conversation["mapping"], conversation.get("current_node")), 1):
        text = _text_of(message)
        role = (message.get("author") or {}).get("role")
        hidden = (message.get("metadata") or {}).get("is_visually_hidden_from_conversation")
        if role not in {"user", "assistant"} or hidden or not text:
            continue
        before = _moment(message.get("create_time")) or before
        yield ChatTurn(f"{number}-{at}", text, role, said_at=before, session=session)


def _branch(mapping: Mapping[str, Any], current: Any) -> list[Mapping[str, Any]]:
    """The messages that the user last saw: an edited message begins another branch."""
    nodes = {name: node for name, node in mapping.items() if isinstance(node, dict)}
    if current not in nodes:
        current = next((name for name, node in nodes.items() if node.get("parent") not in nodes), None)
        seen: set[Any] = set()
        while current is not None and current not in seen:
            seen.add(current)
            children = [child for child in nodes[current].get("children") or () if child in nodes]
            if not children:
                break
            current = children[-1]
    path: list[Mapping[str, Any]] = []
    walked: set[Any] = set()
    while current in nodes and current not in walked:
        walked.add(current)
        message = nodes[current].get("message")
        if isinstance(message, dict):
            path.append(message)
        current = nodes[current].get("parent")
    return path[::-1]


def _text_of(message: Mapping[str, Any]) -> str:
    parts = (message.get("content") or {}).get("parts") or ()
    return "\n".join(part for part in parts if isinstance(part, str)).strip()
