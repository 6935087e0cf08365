"""What is to be forgotten: named explicitly, checked, and the same after a restart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from typing import Any, Literal, get_args

from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.moments import to_microseconds
from llama_index_memory_tiers.storage import codec
from llama_index_memory_tiers.text import folded

ForgetScope = Literal["user", "session"]
Derived = Literal["drop", "rederive"]

_MEDIA = frozenset({"image", "audio", "video", "document"})
_BINARY = frozenset({"image", "audio", "video", "data"})
_FREE = frozenset({"tool_kwargs", "metadata"})  # here the names of fields are not ours


@dataclass(frozen=True, slots=True)
class ForgetFilter:
    """Which messages and records, by what they are; all that are given must hold.

    Args:
        contains: Text that occurs in them: in a message's text and tool calls, in a record's text and fields. Case,
            width and Unicode's normal forms make no difference, nor do signs that are not seen, in either.
        speaker: Who said it: a message's `sent_from`, or its role when there is none.
        sent_to: Whom a message addresses.
        cause_by: What made a message.

    Raises:
        ConfigurationError: None is given, or one is no text.
    """

    contains: str | None = None
    speaker: str | None = None
    sent_to: str | None = None
    cause_by: str | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        wrong = [name for name, value in given.items() if not isinstance(value, str) or not folded(value).strip()]
        if wrong or not given:
            raise ConfigurationError(
                f"ForgetFilter({', '.join(f'{name}={given[name]!r:.100}' for name in wrong)}) was given.",
                allowed="It has at least one of contains, speaker, sent_to and cause_by, each a text with a "
                "visible character.",
                remedy="Say what to look for; to forget everything pass scope= alone.",
            )

    def matches_message(self, role: str, data: str, about: str | None) -> bool:
        """Whether a message, as its row holds it, is meant."""
        try:
            meta = codec.decode_meta(about)
        except (ValueError, TypeError, RecursionError):
            meta = codec.decode_meta(None)
        if self.speaker is not None and self.speaker != (meta.sent_from or role):
            return False
        if self.sent_to is not None and self.sent_to not in meta.send_to:
            return False
        if self.cause_by is not None and self.cause_by != meta.cause_by:
            return False
        return self.contains is None or _occurs(self.contains, data)

    def matches_record(self, text: str, data: str, speaker: str) -> bool:
        """Whether a record is meant; only messages have receivers and causes."""
        if self.sent_to is not None or self.cause_by is not None:
            return False
        if self.speaker is not None and self.speaker != speaker:
            return False
        if self.contains is None:
            return True
        return folded(codec.storable(self.contains)) in folded(text) or _occurs(self.contains, data)


def _occurs(wanted: str, data: str) -> bool:
    needle = folded(codec.storable(wanted))
    try:
        texts: Sequence[str] = list(_strings(json.loads(data)))
    except (ValueError, RecursionError):
        texts = [data]  # damaged: what can be read of it
    return any(needle in folded(text) for text in texts)


def _strings(value: Any, names: bool = False) -> Iterator[str]:
    """All texts inside, without images and the like, whose letters mean nothing; `names` adds those of fields."""
    if isinstance(value, str):
        yield value
        yield from _inside(value)
    elif isinstance(value, Mapping):
        hidden = _BINARY if value.get("block_type") in _MEDIA else frozenset()
        for name, part in value.items():
            if names:
                yield name
            if name not in hidden:
                yield from _strings(part, names or name in _FREE)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part, names)


def _inside(text: str) -> Sequence[str]:
    """Texts inside of one that is JSON, such as a tool's arguments, where a letter may be written as its number."""
    if text.lstrip()[:1] not in {"{", "["}:
        return ()
    try:
        return list(_strings(json.loads(text), names=True))
    except (ValueError, RecursionError):
        return ()


@dataclass(frozen=True, slots=True)
class Selection:
    """What one call forgets.

    Args:
        user_id: The person, or '' for none.
        session_id: Only in this session; `None` reaches all of the person's sessions.
        ids: Only these messages and records, by public id; `None` is no bound.
        before: Only what was said before, microseconds since 1970.
        filter: Only what matches.
        derived: What becomes of records that came from a forgotten message and from others as well.
        external: Keys of blocks that hold data elsewhere, to be told afterwards.
        heads: Private row → newest sequence number of each session when the call was made: later messages stay.
    """

    user_id: str
    session_id: str | None
    ids: tuple[str, ...] | None = None
    before: int | None = None
    filter: ForgetFilter | None = None
    derived: Derived = "drop"
    external: tuple[str, ...] = ()
    heads: Mapping[int, int] = field(default_factory=dict)

    @property
    def everything(self) -> bool:
        """Whether nothing narrows it but the scope."""
        return self.ids is None and self.before is None and self.filter is None

    @property
    def names_records(self) -> bool:
        """Whether records are meant themselves, not only for what they came from."""
        return self.ids is not None or (self.filter is not None and self.filter.contains is not None)

    def to_json(self) -> str:
        """Write it down, so that a restart can go on."""
        return codec.to_json(
            {
                **{one.name: getattr(self, one.name) for one in fields(self)},
                "filter": None if self.filter is None else asdict(self.filter),
                "heads": {str(sid): head for sid, head in self.heads.items()},
            }
        )

    @classmethod
    def from_json(cls, written: str) -> Selection:
        """Read what `to_json` wrote."""
        found = json.loads(written)
        return replace(
            cls(**found),
            ids=None if found["ids"] is None else tuple(found["ids"]),
            external=tuple(found["external"]),
            filter=None if found["filter"] is None else ForgetFilter(**found["filter"]),
            heads={int(sid): head for sid, head in found["heads"].items()},
        )


def checked_selection(
    user_id: str,
    session_id: str,
    *,
    scope: ForgetScope | None,
    ids: Sequence[str] | None = None,
    before: datetime | None = None,
    filter: ForgetFilter | None = None,  # noqa: A002  # the public argument's name
    derived: Derived = "drop",
) -> Selection:
    """Check what `aforget` was given; see there.

    Args:
        user_id: The memory's person, or ''.
        session_id: The memory's session.
        scope: See `aforget`.
        ids: See `aforget`.
        before: See `aforget`.
        filter: See `aforget`.
        derived: See `aforget`.

    Returns:
        The selection, without heads yet.

    Raises:
        ConfigurationError: Names the argument, its value and the way out.
    """
    if scope is None and ids is None and before is None and filter is None:
        raise ConfigurationError(
            "A forget was asked for without saying what to forget.",
            allowed="It takes scope=, ids=, before= and filter=, alone or together.",
            remedy="To forget a whole session pass scope='session', to forget a person scope='user'.",
        )
    _check_choice("scope", scope, (None, *get_args(ForgetScope)))
    _check_choice("derived", derived, get_args(Derived))
    if scope == "user" and not user_id:
        raise ConfigurationError(
            "scope='user' was given to a memory without user_id.",
            allowed="Without a user each session stands for itself.",
            remedy="Pass scope='session', or make the memory with user_id=….",
        )
    if ids is not None and (not _several(ids) or not all(isinstance(one, str) for one in ids)):
        raise _wrong("ids", ids, "a list with at least one id of a message or record")
    if before is not None and not isinstance(before, datetime):
        raise _wrong("before", before, "a datetime; a naive one means UTC")
    if filter is not None and not isinstance(filter, ForgetFilter):
        raise _wrong("filter", filter, "a ForgetFilter")
    return Selection(
        user_id=user_id,
        session_id=None if user_id and scope != "session" else session_id,
        ids=None if ids is None else tuple(dict.fromkeys(ids)),
        before=None if before is None else to_microseconds(before),
        filter=filter,
        derived=derived,
    )


def _several(values: object) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0


def _check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        raise _wrong(name, value, " or ".join(repr(one) for one in allowed if one is not None))


def _wrong(name: str, value: object, allowed: str) -> ConfigurationError:
    return ConfigurationError(
        f"{name}={value!r:.100} was given.",
        allowed=f"{name} is {allowed}.",
        remedy="Correct it; nothing was forgotten.",
    )
