"""Messages as JSON text and back, exactly."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole

from llama_index_memory_tiers.copies import MESSAGE_FIELDS, TEXT_FIELDS, PlainText, Source, fresh, plain_text
from llama_index_memory_tiers.embeddings import MOST_CHARACTERS
from llama_index_memory_tiers.errors import InvalidMessageError
from llama_index_memory_tiers.records import NOTHING, MessageMeta, StoredMessage
from llama_index_memory_tiers.roles import ANSWERING_ROLES
from llama_index_memory_tiers.text import ROLES_ZH

_SURROGATE = re.compile("[\ud800-\udfff]")

_NO_META = MessageMeta()
_META_FIELDS: Mapping[str, type] = {
    "sent_from": str, "send_to": list, "cause_by": str, "utc_offset_seconds": int, "extra": dict
}  # fmt: skip
_REPLIERS = frozenset({"", *(role.value for role in ANSWERING_ROLES), *ROLES_ZH["assistant"]})
_TOLD_ROLES = frozenset({MessageRole.USER, *ANSWERING_ROLES})
_ROLES = {role.value: role for role in MessageRole}  # five times as fast as the enumeration's own look-up
# What `encode_message` writes around the text of a message that has one block, by role.
_TEXT, _PLAIN_TAIL, _NEXT_BLOCK = '"text":', '"}]}', '"},{"'
_PLAIN_HEADS = {
    f'{{"role":"{role.value}","additional_kwargs":{{}},"blocks":[{{"block_type":"text",': role for role in MessageRole
}


def encode_message(message: ChatMessage) -> str:
    """Write a message as JSON: Chinese stays readable, lone surrogates and NUL survive any database.

    Args:
        message: Any message that LlamaIndex can dump.

    Returns:
        JSON text that holds no NUL and can be encoded as UTF-8.

    Raises:
        InvalidMessageError: A part of it cannot be written as JSON.
    """
    plain = plain_text(message)
    try:
        if plain is None:
            return to_json(message.model_dump(mode="json"))
        blocks = [{"block_type": "text", "text": text} for text in plain.texts]
        return to_json({"role": plain.role.value, "additional_kwargs": {}, "blocks": blocks})
    except Exception as error:  # pydantic, json and users' own models each raise their own
        raise _unwritable(message, error) from error


def to_json(data: Any) -> str:
    """Write JSON-like data; see `encode_message`."""
    written = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", written)


def read_json(text: str) -> Mapping[str, Any]:
    """Read a record's fields; a damaged one has none, as its message is still there."""
    if text == "{}":
        return NOTHING
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return NOTHING
    return fields if isinstance(fields, dict) else NOTHING


def decode_source(fields: Mapping[str, Any]) -> Source:
    """Read what `encode_message` wrote and `json` parsed.

    Args:
        fields: The parsed JSON object.

    Returns:
        What makes an equal message.

    Raises:
        ValueError: The row is damaged; also KeyError and TypeError.
    """
    texts = []
    for block in fields["blocks"]:
        text = block.get("text")
        if type(text) is not str or len(block) != len(TEXT_FIELDS) or block.get("block_type") != "text":
            return ChatMessage.model_validate(fields)  # not text alone
        texts.append(text)
    if fields["additional_kwargs"] or len(fields) != len(MESSAGE_FIELDS):
        return ChatMessage.model_validate(fields)
    return PlainText(_ROLES.get(fields["role"]) or MessageRole(fields["role"]), tuple(texts))


def decode_sources(data: Sequence[str | None]) -> list[Source | Exception]:
    """Read many messages, in half the time: one parse for all, and of a single block of text only that text.

    Args:
        data: JSON of each message.

    Returns:
        What makes each message, or what is wrong with it.
    """
    roles, parts = [], []
    for written in data:
        text = written if isinstance(written, str) else ""  # a damaged one may be bytes
        head, _, part = text.partition(_TEXT)
        role = _PLAIN_HEADS.get(head)
        if role and part.endswith(_PLAIN_TAIL) and _NEXT_BLOCK not in part:
            part = part[: 1 - len(_PLAIN_TAIL)]
        else:
            part, role = text, None
        roles.append(role)
        parts.append(part)
    try:
        parsed = json.loads(f"[{','.join(parts)}]")
    except (ValueError, RecursionError):
        parsed = []
    if len(parsed) != len(data):  # a row is damaged, perhaps by holding more than one value
        return [_attempt(written) for written in data]
    new = tuple.__new__  # what PlainText itself calls, after a call of Python
    return [
        new(PlainText, (role, (value,)))
        if role and type(value) is str
        else _attempt(value if isinstance(value, dict) else written)
        for role, value, written in zip(roles, parsed, data, strict=True)
    ]


def _attempt(given: Any) -> Source | Exception:
    try:
        return decode_source(given if isinstance(given, dict) else json.loads(given))
    except Exception as error:  # noqa: BLE001  # pydantic, json and base64 each raise their own
        return error


def decode_message(data: str) -> ChatMessage:
    """Read one message that `encode_message` wrote; raises as `decode_source` does."""
    return fresh((decode_source(json.loads(data)),))[0]


def merge_messages(data: Sequence[str]) -> str:
    """Write several messages as one, as a context shows its system messages.

    Args:
        data: JSON of each.

    Returns:
        JSON of one message: the first one's role, the blocks of all.
    """
    parsed = [json.loads(text) for text in data]
    kwargs: dict[str, Any] = {}
    for fields in reversed(parsed):
        kwargs |= fields["additional_kwargs"]
    blocks = [block for fields in parsed for block in fields["blocks"]]
    return to_json({"role": parsed[0]["role"], "additional_kwargs": kwargs, "blocks": blocks})


def content_hash(data: str) -> str:
    """Name a message by what it says.

    Args:
        data: What `encode_message` wrote.

    Returns:
        32 hex digits, equal for equal messages.
    """
    return hashlib.blake2b(data.encode(), digest_size=16).hexdigest()


def encode_meta(meta: MessageMeta) -> str | None:
    """Write metadata as JSON; `None` when there is none."""
    if meta == MessageMeta():
        return None
    fields: dict[str, Any] = {
        "sent_from": meta.sent_from,
        "send_to": list(meta.send_to),
        "cause_by": meta.cause_by,
        "utc_offset_seconds": meta.utc_offset_seconds,
        "extra": dict(meta.extra),
    }
    try:
        return to_json({name: value for name, value in fields.items() if value})
    except (TypeError, ValueError) as error:
        raise InvalidMessageError(
            f"Metadata that cannot be written as JSON was given ({error}).",
            allowed="sent_from and cause_by are text, send_to a list of texts.",
            remedy="Convert the value to text.",
        ) from error


def decode_meta(data: str | None) -> MessageMeta:
    """Read what `encode_meta` wrote; raises ValueError, TypeError or RecursionError when it is damaged."""
    if data is None:
        return _NO_META
    fields = json.loads(data)
    if not isinstance(fields, dict) or not all(
        isinstance(fields.get(name, kind()), kind) for name, kind in _META_FIELDS.items()
    ):
        raise TypeError("no metadata")
    return MessageMeta(
        sent_from=fields.get("sent_from", ""),
        send_to=tuple(fields.get("send_to", ())),
        cause_by=fields.get("cause_by", ""),
        utc_offset_seconds=fields.get("utc_offset_seconds", 0),
        extra=fields.get("extra", {}),
    )


def storable(text: str) -> str:
    """Text for a column: without NUL and lone surrogates, which PostgreSQL and UTF-8 refuse."""
    return _SURROGATE.sub("\ufffd", text.replace("\0", "")) if not text.isascii() or "\0" in text else text


def embedded_text(text: str) -> str:
    """What stands for a text in the embedding space: bounded, and without what tokenizers and HTTP clients refuse."""
    return storable(text)[:MOST_CHARACTERS]


def embedded_message(text: str, role: MessageRole, speaker: str) -> str:
    """What stands for a message in the embedding space, whether it is embedded at once or again later.

    Who said it is known without its vector, and a name in it draws a question that names somebody to all that they
    said: +.013 / +.001 with a static model, +.012 / +.004 with a small transformer. A model's reply says that it is
    one, as what people say of themselves answers more.

    Args:
        text: What was said.
        role: Whose it is.
        speaker: Who said it, or "".

    Returns:
        The text without its speaker; see `embedded_text`.
    """
    reply = role in ANSWERING_ROLES and speaker.strip().casefold() in _REPLIERS
    return embedded_text(f"Assistant: {text}" if reply else text)


def told(messages: Iterable[StoredMessage]) -> str:
    """What people and assistants said in messages, joined by newlines."""
    return "\n".join(text for stored in messages if stored.role in _TOLD_ROLES and (text := stored.text.strip()))


def _unwritable(message: ChatMessage, error: Exception) -> InvalidMessageError:
    kinds = ", ".join(sorted({type(block).__name__ for block in message.blocks})) or "none"
    return InvalidMessageError(
        f"A {message.role.value} message with blocks {kinds} cannot be written as JSON ({type(error).__name__}).",
        allowed="Blocks and additional_kwargs hold text, numbers, lists, dicts and LlamaIndex's own models.",
        remedy="Convert what is inside additional_kwargs or the block to such values; nothing was stored.",
    )
