"""Messages as JSON text and back, exactly; quick copies of them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from pydantic import BaseModel

from llama_index_memory_tiers.errors import InvalidMessageError
from llama_index_memory_tiers.records import MessageMeta, aware

_SURROGATE = re.compile("[\ud800-\udfff]")
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
_TEXT_FIELDS = {"block_type", "text"}

M = TypeVar("M", bound=BaseModel)


def encode_message(message: ChatMessage) -> str:
    """Write a message as JSON: Chinese stays readable, lone surrogates and NUL survive any database.

    Args:
        message: Any message that LlamaIndex can dump.

    Returns:
        JSON text that holds no NUL and can be encoded as UTF-8.

    Raises:
        InvalidMessageError: A part of it cannot be written as JSON.
    """
    if _is_plain(message):
        data: dict[str, Any] = {
            "role": message.role.value,
            "additional_kwargs": {},
            "blocks": [{"block_type": "text", "text": block.text} for block in message.blocks],  # type: ignore[union-attr]  # _is_plain
        }
    else:
        try:
            data = message.model_dump(mode="json")
        except Exception as error:
            raise _unwritable(message, error) from error
    try:
        return to_json(data)
    except (TypeError, ValueError) as error:
        raise _unwritable(message, error) from error


def to_json(data: Any) -> str:
    """Write JSON-like data; see `encode_message`."""
    written = json.dumps(data, ensure_ascii=False, allow_nan=True, separators=(",", ":"))
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", written)


def decode_message(data: str) -> ChatMessage:
    """Read what `encode_message` wrote.

    Args:
        data: JSON text.

    Returns:
        An equal message.

    Raises:
        ValueError: The row is damaged.
    """
    fields = json.loads(data)
    blocks = fields["blocks"]
    if not fields["additional_kwargs"] and all(
        block.keys() == _TEXT_FIELDS and block["block_type"] == "text" for block in blocks
    ):
        return _plain(MessageRole(fields["role"]), [block["text"] for block in blocks])
    return ChatMessage.model_validate(fields)


def clone(message: ChatMessage) -> ChatMessage:
    """Copy a message so that nothing is shared with the original.

    Args:
        message: Any message.

    Returns:
        A deep copy; 2 µs for text, where `model_copy(deep=True)` takes 12.
    """
    if _is_plain(message):
        return _plain(message.role, [block.text for block in message.blocks])  # type: ignore[union-attr]  # _is_plain
    return message.model_copy(deep=True)


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
    """Read what `encode_meta` wrote."""
    if data is None:
        return MessageMeta()
    fields: Mapping[str, Any] = json.loads(data)
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


def to_microseconds(time: datetime) -> int:
    """Microseconds since 1970 in UTC; naive times are read as UTC."""
    return (aware(time) - _EPOCH) // _MICROSECOND


def from_microseconds(count: int, utc_offset_seconds: int = 0) -> datetime:
    """An aware datetime in the given zone."""
    moment = _EPOCH + timedelta(microseconds=count)
    if not utc_offset_seconds:
        return moment
    return moment.astimezone(timezone(timedelta(seconds=utc_offset_seconds)))


def _is_plain(message: ChatMessage) -> bool:
    return (
        type(message) is ChatMessage
        and not message.additional_kwargs
        and all(type(block) is TextBlock for block in message.blocks)
    )


def _plain(role: MessageRole, texts: list[str]) -> ChatMessage:
    blocks = [_bare(TextBlock, {"block_type": "text", "text": text}) for text in texts]
    return _bare(ChatMessage, {"role": role, "additional_kwargs": {}, "blocks": blocks})


def _bare(model: type[M], fields: dict[str, Any]) -> M:
    """Make a model as pydantic's own copy does: the put has validated these fields already.

    Decoding 1 000 rows takes 4 ms instead of 9, copying them 2 ms instead of 12.
    """
    made = model.__new__(model)
    object.__setattr__(made, "__dict__", fields)
    object.__setattr__(made, "__pydantic_fields_set__", set(fields))
    object.__setattr__(made, "__pydantic_extra__", None)
    object.__setattr__(made, "__pydantic_private__", None)
    return made


def _unwritable(message: ChatMessage, error: Exception) -> InvalidMessageError:
    kinds = ", ".join(sorted({type(block).__name__ for block in message.blocks})) or "none"
    return InvalidMessageError(
        f"A {message.role.value} message with blocks {kinds} cannot be written as JSON ({type(error).__name__}).",
        allowed="Blocks and additional_kwargs hold text, numbers, lists, dicts and LlamaIndex's own models.",
        remedy="Convert what is inside additional_kwargs or the block to such values; nothing was stored.",
    )
