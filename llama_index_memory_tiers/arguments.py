"""The arguments of a memory: checked, completed, and resolved to a place, before anything is stored."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory import StaticMemoryBlock
from llama_index.core.memory.memory import (
    DEFAULT_MEMORY_BLOCKS_TEMPLATE,
    DEFAULT_TOKEN_LIMIT,
    BaseMemoryBlock,
    InsertMethod,
)
from llama_index.core.prompts import RichPromptTemplate
from llama_index.core.storage.chat_store.base_db import AsyncDBChatStore
from llama_index.core.utils import get_tokenizer

from llama_index_memory_tiers.budget import DOCUMENT_TOKENS, MEDIA_TOKENS, TokenBudget, TokenCounter, usual_flush
from llama_index_memory_tiers.checks import check_number, check_whole, repeated
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.records import Scope
from llama_index_memory_tiers.redaction import Redactor
from llama_index_memory_tiers.retention import checked_policies
from llama_index_memory_tiers.storage import Storage
from llama_index_memory_tiers.storage.chat_store import TieredChatStore

_DEFAULTS: Mapping[str, Any] = {
    "session_id": None,
    "user_id": None,
    "agent_id": None,
    "token_limit": DEFAULT_TOKEN_LIMIT,
    "token_flush_size": None,
    "chat_history_token_ratio": 0.7,
    "memory_blocks": None,
    "memory_blocks_template": DEFAULT_MEMORY_BLOCKS_TEMPLATE,
    "insert_method": InsertMethod.SYSTEM,
    "image_token_size_estimate": MEDIA_TOKENS,
    "audio_token_size_estimate": MEDIA_TOKENS,
    "video_token_size_estimate": MEDIA_TOKENS,
    "document_token_size_estimate": DOCUMENT_TOKENS,
    "tokenizer_fn": None,
    "reserve_tokens": 0,
    "budget": None,
    "window_messages": None,
    "overflow": "event",
    "delivery": "background",
    "recall_position": "system",
    "claim_seconds": 30.0,
    "retention": (),
    "maintain_every": None,
}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "overflow": ("event", "raise"),
    "delivery": ("background", "inline"),
    "recall_position": ("system", "user"),
}
_SQL_ARGUMENTS = ("table_name", "async_database_uri", "async_engine", "db_schema")


@dataclass(frozen=True, slots=True)
class Arguments:
    """Checked arguments.

    Args:
        fields: For the memory's own fields; without the session id.
        session_id: What was given.
        user_id: What was given.
        counter: Made from the tokenizer and the estimates.
    """

    fields: dict[str, Any]
    session_id: str | None
    user_id: str | None
    counter: TokenCounter


@dataclass(frozen=True, slots=True)
class Places:
    """Everything that may say where messages are kept; see `TieredMemory`."""

    storage: Storage | str | os.PathLike[str] | None = None
    chat_store: AsyncDBChatStore | None = None
    table_name: str | None = None
    async_database_uri: str | None = None
    async_engine: Any = None
    db_schema: str | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """Where messages are kept.

    Args:
        storage: Holds the log, and the window unless there is a foreign store.
        owned: The memory opened it and closes it.
        chat_store: What LlamaIndex sees as the memory's store.
        foreign_store: The user's own store for the window.
        session_id: Given or made up.
        user_id: Given, or that of the given `TieredChatStore`.
    """

    storage: Storage
    owned: bool
    chat_store: AsyncDBChatStore
    foreign_store: AsyncDBChatStore | None
    session_id: str
    user_id: str | None


def check_arguments(given: Mapping[str, Any]) -> Arguments:
    """Check the arguments of a memory and fill in what is left out.

    Args:
        given: Arguments by name.

    Returns:
        The checked arguments.

    Raises:
        ConfigurationError: Names the argument, its value, what is allowed and the way out.
    """
    unknown = sorted(set(given) - set(_DEFAULTS))
    if unknown:
        known = sorted({*_DEFAULTS, *(each.name for each in dataclasses.fields(Places)), "preset", "redaction"})
        close = (difflib.get_close_matches(one, known, n=1, cutoff=0.5) for one in unknown)
        likely = sorted({name for names in close for name in names})
        raise ConfigurationError(
            f"Unknown arguments were given: {', '.join(unknown)}.",
            allowed=f"TieredMemory knows: {', '.join(known)}.",
            remedy=f"Perhaps {' or '.join(likely)} was meant; else remove them."
            if likely
            else "Remove them, or correct the spelling.",
        )
    fields = {**_DEFAULTS, **given}
    _apply_budget(fields, given)
    _check_numbers(fields)
    _check_choices(fields)
    blocks = _checked_blocks(fields["memory_blocks"])
    if fields["budget"] is not None:
        fields["budget"].check_blocks({block.name: block.priority for block in blocks})
    tokenizer = fields["tokenizer_fn"] or get_tokenizer()
    counter = TokenCounter(
        tokenizer,
        image=fields["image_token_size_estimate"],
        audio=fields["audio_token_size_estimate"],
        video=fields["video_token_size_estimate"],
        document=fields["document_token_size_estimate"],
    )
    _check_static(blocks, counter, fields["token_limit"] - fields["reserve_tokens"])
    session_id = fields.pop("session_id")
    scope = Scope("to be made up" if session_id is None else session_id, fields["user_id"], fields["agent_id"])
    fields |= {"user_id": scope.user_id, "agent_id": scope.agent_id}
    session_id = None if session_id is None else scope.session_id
    return Arguments({**fields, "memory_blocks": blocks, "tokenizer_fn": tokenizer}, session_id, scope.user_id, counter)


def check_request(asked: Any, messages: Any, initial_token_count: Any) -> None:
    """Check what a context is asked for.

    Args:
        asked: The request, text or message, or `None`.
        messages: Messages, or `None`.
        initial_token_count: Tokens that are spoken for.

    Raises:
        ConfigurationError: Names the argument, its value, what is allowed and the way out.
    """
    if asked is not None and not isinstance(asked, str | ChatMessage):
        raise ConfigurationError(
            f"input={asked!r:.100} was given.",
            allowed="It is the request as text or as a ChatMessage.",
            remedy="Pass one of them, or leave it out for the newest user message.",
        )
    several = isinstance(messages, Sequence) and not isinstance(messages, str)
    if messages is not None and not (several and all(isinstance(message, ChatMessage) for message in messages)):
        raise ConfigurationError(
            f"messages of type {type(messages).__name__} were given.",
            allowed="It is a list of ChatMessages.",
            remedy="Write messages=[ChatMessage(…)], or leave it out for the window.",
        )
    check_whole("initial_token_count", initial_token_count, least=0)


def _apply_budget(fields: dict[str, Any], given: Mapping[str, Any]) -> None:
    """A budget says what the single arguments say: they may be left out, not contradict it."""
    if fields["budget"] is None:
        return
    budget = fields["budget"] = TokenBudget.of(fields["budget"])
    for name, theirs, value in (
        ("token_limit", "total", budget.total),
        ("reserve_tokens", "reserve", budget.reserve),
    ):
        if name in given and given[name] != value:
            raise ConfigurationError(
                f"{name}={given[name]!r:.100} was given with budget=TokenBudget({theirs}={value}).",
                allowed=f"The budget's {theirs} is the memory's {name}.",
                remedy=f"Leave {name} out, or pass the same number in both.",
            )
        fields[name] = value


def _check_numbers(fields: dict[str, Any]) -> None:
    check_whole("token_limit", fields["token_limit"], least=1)
    check_whole("reserve_tokens", fields["reserve_tokens"], least=0)
    if fields["reserve_tokens"] >= fields["token_limit"]:
        raise ConfigurationError(
            f"reserve_tokens={fields['reserve_tokens']} was given with token_limit={fields['token_limit']}.",
            allowed="The reserve is smaller than the limit.",
            remedy="Lower reserve_tokens or raise token_limit.",
        )
    limit = fields["token_limit"]
    check_number("chat_history_token_ratio", fields["chat_history_token_ratio"], least=0.0, most=1.0)
    if fields["token_flush_size"] is None:
        budget = fields["budget"] or TokenBudget(limit, fields["reserve_tokens"])
        fields["token_flush_size"] = usual_flush(limit, budget.window_tokens(fields["chat_history_token_ratio"]))
    check_whole("token_flush_size", fields["token_flush_size"], least=1)
    if fields["token_flush_size"] > limit:
        fields["token_flush_size"] = max(1, limit // 10)  # as stock does
    if fields["window_messages"] is not None:
        check_whole("window_messages", fields["window_messages"], least=1)
    for name in ("image", "audio", "video", "document"):
        check_whole(f"{name}_token_size_estimate", fields[f"{name}_token_size_estimate"], least=0)
    check_number("claim_seconds", fields["claim_seconds"], least=0.05, most=86_400.0)
    if fields["maintain_every"] is not None:
        check_number("maintain_every", fields["maintain_every"], least=1.0, most=366 * 86_400.0)
    fields["retention"] = checked_policies(fields["retention"])


def _check_choices(fields: dict[str, Any]) -> None:
    for name, choices in _CHOICES.items():
        if fields[name] not in choices:
            raise ConfigurationError(
                f"{name}={fields[name]!r} was given.",
                allowed=f"{name} is one of {', '.join(map(repr, choices))}.",
                remedy="Choose one of them.",
            )
    try:
        fields["insert_method"] = InsertMethod(fields["insert_method"])
    except ValueError:
        raise ConfigurationError(
            f"insert_method={fields['insert_method']!r} was given.",
            allowed="insert_method is 'system' or 'user'.",
            remedy="Choose one of them.",
        ) from None
    if not isinstance(fields["memory_blocks_template"], RichPromptTemplate):
        raise ConfigurationError(
            f"memory_blocks_template={fields['memory_blocks_template']!r:.100} was given.",
            allowed="It is a RichPromptTemplate.",
            remedy="Write RichPromptTemplate('…'), or leave it out.",
        )
    tokenizer: Callable[[str], Any] | None = fields["tokenizer_fn"]
    if tokenizer is not None and not callable(tokenizer):
        raise ConfigurationError(
            f"tokenizer_fn={tokenizer!r} was given.",
            allowed="It is a function that turns a text into a list of tokens.",
            remedy="Pass such a function, or leave it out for LlamaIndex's tokenizer.",
        )


def _checked_blocks(blocks: Any) -> list[BaseMemoryBlock[Any]]:
    if blocks is not None and not isinstance(blocks, list | tuple):
        raise ConfigurationError(
            f"memory_blocks={blocks!r:.100} was given.",
            allowed="It is a list of memory blocks.",
            remedy="Write memory_blocks=[…].",
        )
    found = list(blocks or [])
    for block in found:
        if not isinstance(block, BaseMemoryBlock):
            raise ConfigurationError(
                f"memory_blocks holds {block!r}.",
                allowed="Each is an instance of a BaseMemoryBlock.",
                remedy="Create the block, as in memory_blocks=[VectorMemoryBlock()].",
            )
    twice = repeated(block.name for block in found)
    if twice:
        raise ConfigurationError(
            f"memory_blocks has several blocks named {', '.join(map(repr, twice))}.",
            allowed="All memory blocks must have unique names.",
            remedy="Give each a name of its own: name='…'.",
        )
    return found


def _check_static(blocks: list[BaseMemoryBlock[Any]], counter: TokenCounter, limit: int) -> None:
    fixed = [block for block in blocks if isinstance(block, StaticMemoryBlock) and block.priority == 0]
    tokens = sum(counter.blocks(block.static_content) for block in fixed)
    if tokens > limit:
        raise ConfigurationError(
            f"static_content of priority 0 in {', '.join(block.name for block in fixed)} takes {tokens} tokens.",
            allowed=f"It is never cut, and {limit} tokens are allowed in all (token_limit less reserve_tokens).",
            remedy="Shorten it, raise token_limit, or give it a priority of 1 or more.",
        )


def resolve_places(places: Places, arguments: Arguments, redactor: Redactor | None) -> Resolved:
    """Find out where messages are kept.

    Args:
        places: What was given.
        arguments: Checked arguments.
        redactor: Takes secrets out of what is put into the chat store, too.

    Returns:
        The storage and whose it is.

    Raises:
        ConfigurationError: Arguments exclude each other (the error names both), or a durable place has no id.
    """
    _exclude(places)
    if places.chat_store is not None and not isinstance(places.chat_store, AsyncDBChatStore):
        raise ConfigurationError(
            f"chat_store={places.chat_store!r:.100} was given.",
            allowed="It is an AsyncDBChatStore of LlamaIndex.",
            remedy="Pass such a store, or a path or URI as storage=.",
        )
    user_id = arguments.user_id
    foreign = None
    if isinstance(places.chat_store, TieredChatStore):
        storage, owned = places.chat_store.storage, False
        user_id = _same_user(places.chat_store, user_id)
    elif places.chat_store is not None:
        storage, owned, foreign = Storage(), True, places.chat_store
    elif isinstance(places.storage, Storage):
        storage, owned = places.storage, False
    else:
        storage, owned = _opened(places), True
    session_id = arguments.session_id
    if session_id is None:
        if user_id is None and foreign is None and not storage.private:
            raise ConfigurationError(
                f"The durable storage {storage.address!r} was given with neither user_id nor session_id.",
                allowed="What is kept must be found again by an id.",
                remedy="Pass user_id='…' (one person, many sessions), session_id='…', or both.",
            )
        session_id = storage.ids()
    store = foreign if foreign is not None else TieredChatStore(storage, user_id=user_id, redaction=redactor)
    return Resolved(storage, owned, store, foreign, session_id, user_id)


def _opened(places: Places) -> Storage:
    names: dict[str, Any] = {"db_schema": places.db_schema}
    if places.table_name is not None:
        names["table_name"] = places.table_name
    if places.async_engine is not None:
        return Storage(engine=places.async_engine, **names)
    return Storage(places.storage if places.storage is not None else places.async_database_uri, **names)  # type: ignore[arg-type]  # no Storage here


def _exclude(places: Places) -> None:
    given = [name for name in _SQL_ARGUMENTS if getattr(places, name) is not None]
    if places.chat_store is not None:
        given += ["storage"] if places.storage is not None else []
        _refuse_pair("chat_store", given)
    elif isinstance(places.storage, Storage):
        _refuse_pair("storage", given)
    elif places.storage is not None:
        _refuse_pair("storage", [name for name in given if name in {"async_database_uri", "async_engine"}])
    elif places.async_engine is not None and places.async_database_uri is not None:
        _refuse_pair("async_engine", ["async_database_uri"])


def _refuse_pair(first: str, others: list[str]) -> None:
    if others:
        raise ConfigurationError(
            f"{first} and {' and '.join(others)} were given together.",
            allowed="They exclude each other: each says where messages are kept.",
            remedy=f"Pass {first} or {others[0]}, not both; names of tables belong to Storage(…, table_name=…).",
        )


def _same_user(store: TieredChatStore, user_id: str | None) -> str | None:
    if user_id is not None and store.user_id is not None and store.user_id != user_id:
        raise ConfigurationError(
            f"user_id={user_id!r} and a chat_store of user_id={store.user_id!r} were given together.",
            allowed="A TieredChatStore belongs to one user.",
            remedy="Make the store with the same user_id, or pass storage= instead.",
        )
    return user_id if user_id is not None else store.user_id
