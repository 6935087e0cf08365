"""What a block is to us: it absorbs batches of the log into records and offers items for a context."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from inspect import isclass
from typing import Any, ClassVar, Literal, get_args

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory.memory import BaseMemoryBlock
from llama_index.core.utils import get_tokenizer
from pydantic import BaseModel, Field, PrivateAttr, ValidationError, model_validator
from typing_extensions import Self

from llama_index_memory_tiers.blocks.absorbing import Absorber
from llama_index_memory_tiers.blocks.consumer import Due, Trigger
from llama_index_memory_tiers.budget import Item, TokenCounter, section_text
from llama_index_memory_tiers.checks import check_kind, checked
from llama_index_memory_tiers.errors import ConfigurationError, ExtractionError
from llama_index_memory_tiers.moments import aware
from llama_index_memory_tiers.records import Batch, Changes, Forgotten, Place, Reads, Record, Scope
from llama_index_memory_tiers.retention import Holding
from llama_index_memory_tiers.storage import Entry, OwnerReader, Storage, Visits, codec, owner_key

_NO_SESSION = "default"  # stock Memory always names a session; a block called by hand may not
_CLAIM_SECONDS = 30.0
_ALONE_TOKENS = 2000  # stock Memory tells a block no allowance


@dataclass(frozen=True, slots=True)
class Query:
    """What a context is built for.

    Args:
        text: The current request, not a soup of recent turns.
        now: The clock.
        scope: Who asks, in which session.
        messages: What stock blocks are given: the window and the request.
        visible: Messages that the window shows anyway.
        allowance: Tokens that the block may at most use.
        counter: Measures texts.
        sid: Private row of the session; 0 when it does not exist yet.
    """

    text: str
    now: datetime
    scope: Scope
    messages: tuple[ChatMessage, ...]
    visible: frozenset[Place]
    allowance: int
    counter: TokenCounter
    sid: int = 0


class TieredMemoryBlock(BaseMemoryBlock[str]):
    """Base of our blocks: state lives in the storage, never in the object.

    In `TieredMemory` a block shares its storage. In LlamaIndex's own `Memory` it owns one, private unless `storage`
    is given, keyed by `session_id`.

    Args:
        name: Section in the context; unique within a memory.
        priority: 0 is never cut, larger numbers are cut first; default 1.
        scope: Remember for the `user` across sessions (default), or for the `session` alone.
        storage: For use in stock `Memory`: where to keep things.
        absorb_on: When to absorb: at each complete `turn`, when turns are flushed (`flush`), when the session is
            `idle`.
        absorb_every: Complete turns that make a batch due.
        idle_seconds: Silence after which everything is absorbed.
        batch_tokens: Bound of one batch, in tokens.
        timeout_seconds: Bound of one `prepare` or `recall`, in seconds.
        backfill: A block with a model that is attached to an old session reads it from the beginning.
    """

    priority: int = Field(default=1, ge=0)
    scope: Literal["user", "session"] = "user"
    storage: Storage | None = Field(default=None, exclude=True, repr=False)
    absorb_on: frozenset[Trigger] = frozenset({"turn", "idle"})
    absorb_every: int = Field(default=1, ge=1)
    idle_seconds: float = Field(default=60.0, gt=0)
    batch_tokens: int = Field(default=4000, ge=1)
    timeout_seconds: float = Field(default=60.0, gt=0)
    backfill: bool = False
    uses_model: ClassVar[bool] = False
    stable: ClassVar[bool] = False
    _own: Storage | None = PrivateAttr(default=None)

    def __init__(self, **fields: Any) -> None:
        with checked_fields(type(self), fields):
            super().__init__(**fields)

    @model_validator(mode="after")
    def _named(self) -> Self:
        if not self.name.strip() or codec.storable(self.name) != self.name:
            raise ConfigurationError(
                f"name={self.name!r:.100} was given to {type(self).__name__}.",
                allowed="A block's name has a visible character, and neither NUL nor lone surrogates.",
                remedy="Leave it out or choose one.",
            )
        return self

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """What `repr` shows: which block it is and what it works with; no texts, and nothing that may hold a key."""
        yield "name", self.name
        yield "priority", self.priority
        yield "scope", self.scope
        for model in ("llm", "embed_model"):
            if getattr(self, model, None) is not None:
                yield model, type(getattr(self, model)).__name__

    def __str__(self) -> str:
        return repr(self)

    @property
    def key(self) -> str:
        """Name of the cursor; renaming a block starts a new one."""
        return self.name

    @property
    def per_session(self) -> bool:
        """Whether each session has records of its own."""
        return self.scope == "session"

    @property
    def window_bound(self) -> tuple[int, int] | None:
        """Messages that the window may hold for this block's sake, and how many leave together; `None` for no bound."""
        return None

    @property
    def hold_back(self) -> int:
        """Newest complete turns that stay unread while the chat goes on."""
        return 0

    @property
    def hears_others(self) -> bool:
        """Whether what it recalls changes with what others say: then no answer of it is kept for a turn."""
        return False

    def holding(self, record: Record, visits: Visits | None, now: datetime) -> Holding:  # noqa: ARG002  # for blocks with heat
        """A record of this block as seen by who decides what may leave."""
        weight = record.data.get("importance")
        return Holding(
            id=record.id,
            block=self.name,
            kind=record.kind,
            said_at=aware(record.said_at or record.created_at),
            text=record.text,
            used_at=None if visits is None else visits.last_at,
            importance=float(weight) if isinstance(weight, int | float) else 0.5,
            pinned=bool(record.data.get("pinned")),
        )

    async def prepare(self, batch: Batch, reader: OwnerReader, counter: TokenCounter) -> Any:
        """Turn messages into a draft; may be slow and call models, writes nothing.

        Args:
            batch: What to absorb; empty when there is only housekeeping.
            reader: The owner's records as they are now; they may have changed when `merge` comes.
            counter: Measures texts.

        Returns:
            A draft for `merge`, or `None` when there is nothing to write.
        """
        raise NotImplementedError

    def reads(self, draft: Any) -> Reads:  # noqa: ARG002
        """Name the records that `merge` must see afresh."""
        return Reads()

    def merge(self, draft: Any, records: Sequence[Record]) -> Changes:
        """Decide what to write; pure, runs inside the transaction that moves the cursor."""
        raise NotImplementedError

    async def recall(self, query: Query, reader: OwnerReader) -> Sequence[Item]:
        """Offer items for a context, best first.

        Args:
            query: What it is for.
            reader: The owner's records.

        Returns:
            Items, each kept whole or left out.
        """
        raise NotImplementedError

    # -- forgetting ------------------------------------------------------------------------------------------

    @property
    def holds_external_data(self) -> bool:
        """Whether it keeps anything outside the storage, so that `forget` has to be called."""
        return False

    async def forget(self, forgotten: Forgotten) -> None:
        """Delete what it keeps outside the storage; the storage's own rows are gone when this is called.

        It is called until it has returned once: a failure leaves it pending, and the receipt says so.
        It is called as well for what was forgotten while `prepare` wrote about it elsewhere.

        Args:
            forgotten: Which records and messages.
        """

    async def forget_owner(self, scope: Scope) -> int | None:  # noqa: ARG002  # most blocks keep nothing there
        """Delete all that it keeps outside the storage about somebody who is forgotten as a whole; safe to repeat.

        Args:
            scope: Whose.

        Returns:
            How many things it deleted; `None` when it keeps nothing outside.
        """
        return None

    async def mentions(self, scope: Scope, text: str) -> int | None:  # noqa: ARG002  # most blocks keep nothing there
        """How often a text that is to be forgotten still stands in what it keeps outside the storage.

        Args:
            scope: Whose.
            text: Whatever its case.

        Returns:
            Times; `None` when it keeps nothing outside.
        """
        return None

    # -- use in LlamaIndex's own Memory ----------------------------------------------------------------------

    @checked
    async def aput(
        self, messages: list[ChatMessage], from_short_term_memory: bool = False, session_id: str | None = None
    ) -> None:
        """Absorb messages at once; they are copied, and stored in the block's own storage.

        Args:
            messages: What left the window.
            from_short_term_memory: Said by `Memory` when it flushes.
            session_id: The session.

        Raises:
            MemoryTiersError: What the block could not absorb stays in its storage and is tried again next time.
        """
        if not messages or (from_short_term_memory and not self.accept_short_term_memory):
            return
        storage, counter = self._storage(), TokenCounter(get_tokenizer())
        entries = [
            Entry(
                storage.ids(),
                message.role.value,
                counter.message(message),
                counter.name,
                storage.now(),
                codec.encode_message(message),
            )
            for message in messages
        ]
        key = session_id or _NO_SESSION
        await storage.log.append("", key, entries, now=storage.now(), consumers=[self.key])
        session = await storage.log.session("", key)
        assert session is not None  # noqa: S101  # the append made it
        due = Due(to_head=True, silent_seconds=math.inf, flushed_until=session.head_seq)
        absorber = Absorber(storage, counter, claim_seconds=_CLAIM_SECONDS)
        while True:
            step = await absorber.absorb(self, session, due)
            if step.outcome in {"nothing", "busy"}:
                return
            if step.outcome in {"failed", "outage"}:
                raise ExtractionError(
                    f"{self.name} could not absorb {len(messages)} messages ({step.error}).",
                    allowed="They are kept and tried again with the next ones.",
                    remedy="Look at the model's error in the log of its own package.",
                )

    async def _aput(self, messages: list[ChatMessage]) -> None:
        await self.aput(messages)

    async def _aget(
        self,
        messages: list[ChatMessage] | None = None,
        session_id: str | None = None,
        **block_kwargs: Any,  # noqa: ARG002  # stock's signature
    ) -> str:
        storage, counter = self._storage(), TokenCounter(get_tokenizer())
        key = session_id or _NO_SESSION
        session = await storage.log.session("", key)
        sid = 0 if session is None else session.sid
        scope = Scope(key)
        query = Query(
            text=newest_request(messages or []),
            now=storage.clock(),
            scope=scope,
            messages=tuple(messages or []),
            visible=frozenset(),
            allowance=_ALONE_TOKENS,
            counter=counter,
            sid=sid,
        )
        owner = owner_key(scope, sid)
        items = await self.recall(query, OwnerReader(storage.records, owner, self.key))
        return section_text(_affordable(items, counter))

    async def aclose(self) -> None:
        """Close the private storage of a block that was used in stock `Memory`."""
        if self._own is not None:
            await self._own.aclose()

    def _storage(self) -> Storage:
        if self.storage is not None:
            return self.storage
        if self._own is None:
            self._own = Storage()
        return self._own


@contextmanager
def checked_fields(block: type[BaseMemoryBlock[Any]], fields: Mapping[str, Any]) -> Iterator[None]:
    """Refuse what a block cannot be made of, in our words.

    Args:
        block: What is made inside.
        fields: Of what.

    Raises:
        ConfigurationError: Names the argument and its value.
    """
    _check_fields(block, fields)
    try:
        yield
    except ValidationError as error:
        raise _refused(block, error) from None


def _check_fields(block: type[BaseMemoryBlock[Any]], fields: Mapping[str, Any]) -> None:
    """Refuse what pydantic lets pass: a misspelt name, which it ignores, and True, which it takes for 1.

    Also a mapping, of which it tries to make a model that only a class of its own can be.
    """
    known = block.model_fields
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ConfigurationError(
            f"Unknown arguments were given to {block.__name__}: {', '.join(unknown)}.",
            allowed=f"It knows: {', '.join(sorted(known))}.",
            remedy="Remove them, or correct the spelling.",
        )
    for name, value in fields.items():
        kinds = {known[name].annotation, *get_args(known[name].annotation)}
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ConfigurationError(
                f"{name}={value!r} was given to {block.__name__}.",
                allowed=f"{name} is a number.",
                remedy="Pass a number, or leave it out.",
            )
        if isinstance(value, Mapping) and any(isclass(kind) and issubclass(kind, BaseModel) for kind in kinds):
            check_kind(name, value, known[name].annotation)


def _refused(block: type[BaseMemoryBlock[Any]], error: ValidationError) -> ConfigurationError:
    """What pydantic found, in our words; an error of ours that it wrapped comes out as it was."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigurationError):
        return cause
    name = ".".join(map(str, first["loc"])) or "arguments"
    missing = first["type"] == "missing"
    return ConfigurationError(
        f"{block.__name__} was made without {name}."
        if missing
        else f"{name}={first['input']!r:.100} was given to {block.__name__}.",
        allowed=f"{first['msg']}.",
        remedy=_way_out(name, first["input"], missing=missing),
    )


def _way_out(name: str, given: object, *, missing: bool) -> str:
    if name.startswith(("llm", "query_llm")) and isinstance(given, str):
        return f"Pass the model itself, such as OpenAI(model={given!r:.100})."
    if name.startswith("embed_model") and isinstance(given, str):
        return "Pass the model itself; llama_index.core.embeddings.resolve_embed_model makes one of a name."
    return "Pass what is allowed." if missing else "Pass what is allowed, or leave it out."


def newest_request(messages: Sequence[ChatMessage]) -> str:
    """The text of the newest user message, '' when there is none.

    Args:
        messages: Oldest first.

    Returns:
        Its text blocks joined.
    """
    for message in reversed(messages):
        if message.role == MessageRole.USER:
            return message.content or ""
    return ""


def _affordable(items: Sequence[Item], counter: TokenCounter) -> list[Item]:
    kept: list[Item] = []
    left = _ALONE_TOKENS
    for item in items:
        left -= counter.text(item.text + "\n")
        if left < 0:
            break
        kept.append(item)
    return kept
