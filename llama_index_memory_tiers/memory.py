"""TieredMemory: takes messages in, keeps the window small, hands contexts out."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage, ContentBlock, MessageRole
from llama_index.core.memory import Memory
from llama_index.core.memory.memory import (
    DEFAULT_MEMORY_BLOCKS_TEMPLATE,
    DEFAULT_TOKEN_LIMIT,
    BaseMemoryBlock,
    InsertMethod,
)
from llama_index.core.prompts import RichPromptTemplate
from llama_index.core.storage.chat_store.base_db import AsyncDBChatStore, MessageStatus
from pydantic import PrivateAttr
from typing_extensions import Self

from llama_index_memory_tiers import failpoints
from llama_index_memory_tiers.arguments import (
    Arguments,
    Places,
    check_arguments,
    check_request,
    resolve_places,
)
from llama_index_memory_tiers.blocks import TieredMemoryBlock, VectorMemoryBlock, consumers_of
from llama_index_memory_tiers.blocks.desk import Desk
from llama_index_memory_tiers.board import Duplicates, MessageBoard
from llama_index_memory_tiers.budget import RESULT_ROLES, TokenBudget, TokenCounter, plan_flush, window_row
from llama_index_memory_tiers.context import ContextBuilder, Request, Settings, make_request
from llama_index_memory_tiers.delivery import Delivery, Key
from llama_index_memory_tiers.entries import EntryMaker, Prepared
from llama_index_memory_tiers.errors import ConfigurationError, StorageError
from llama_index_memory_tiers.events import ContextReport, FlushReport, ForgetReceipt, MessagesPut, WindowFlushed, emit
from llama_index_memory_tiers.forgetting import Forgetter
from llama_index_memory_tiers.portal import portal
from llama_index_memory_tiers.records import Cause, Recollection, Scope, StoredMessage
from llama_index_memory_tiers.redaction import Redactor, checked_redaction
from llama_index_memory_tiers.storage import DeadLetter, ReindexProgress, ReindexReport, Storage
from llama_index_memory_tiers.storage.chat_store import TieredChatStore
from llama_index_memory_tiers.storage.database import lacks_password
from llama_index_memory_tiers.storage.selection import Derived, ForgetFilter, ForgetScope, Selection, checked_selection
from llama_index_memory_tiers.storage.transfer import Progress, Target, TransferReport
from llama_index_memory_tiers.views import MemoryView
from llama_index_memory_tiers.windows import LogWindow, SessionWindow, StoreWindow

_logger = logging.getLogger(__name__)

HANDLE_VERSION = 1
_RAW_SESSIONS = 1024

_Turns = weakref.WeakValueDictionary[tuple[int, Key], asyncio.Lock]


@dataclass(slots=True)
class _Shared:
    """What all memories made from one by `for_session` have in common."""

    storage: Storage
    owns_storage: bool
    store: AsyncDBChatStore | None
    counter: TokenCounter
    entries: EntryMaker
    delivery: Delivery
    contexts: ContextBuilder
    forgetter: Forgetter
    raw: dict[Key, dict[str, ChatMessage]] = field(default_factory=dict)
    stuck: dict[Key, bool] = field(default_factory=dict)
    turns: _Turns = field(default_factory=weakref.WeakValueDictionary)

    def turn(self, key: Key) -> asyncio.Lock:
        """A lock under which flushes of a session follow each other: a foreign store archives by position."""
        place = (id(asyncio.get_running_loop()), key)
        lock = self.turns.get(place)
        if lock is None:
            lock = self.turns[place] = asyncio.Lock()
        return lock


class TieredMemory(Memory):
    """Long-term, tiered memory for LlamaIndex agents: pass it as `memory=` to `FunctionAgent.run`.

    A drop-in for LlamaIndex's `Memory`: all its arguments work. On top, messages survive restarts and crashes,
    what blocks learn belongs to the user across sessions, and what `aget` returns stays within
    `token_limit - reserve_tokens` as rendered.

    Args:
        session_id: The conversation; made up when a `user_id` is given, or when the storage is private.
        user_id: The person whose long-term memory this is; `None` makes each session its own owner.
        agent_id: The agent, as provenance.
        storage: A `Storage` (shared, you close it), a file path or a database URI (closed by `aclose`). `None` is a
            private temporary database.
        token_limit: Everything that `aget` returns, in tokens; default 30 000.
        reserve_tokens: Room left for what is outside memory: system prompt, tool schemas, the answer; default 0.
        budget: A `TokenBudget`: sets `token_limit`, `reserve_tokens`, the window's share and one for each block.
        chat_history_token_ratio: Share of the limit above which old turns leave the window, 0 to 1; default 0.7.
        token_flush_size: About so many tokens leave at once; default a tenth of the limit, at most 3 000.
        window_messages: Also flush above so many messages; default no bound.
        memory_blocks: What remembers; names are unique. Stock and third-party blocks hold what they learn in
            themselves, for all who share them: make those per user.
        insert_method: Put the memory into the `system` message or into the newest `user` message.
        recall_position: With `user`, only what changes from turn to turn stands beside the newest user message.
        overflow: When priority 0 and the newest user message alone exceed the limit: `event` returns exactly these,
            `raise` raises `BudgetError`.
        delivery: Blocks absorb in the `background`, or `inline` before a put returns.
        claim_seconds: How long the work of a dead worker waits for another; default 30.
        redaction: Takes secrets out of what is stored; `None` switches it off.
        tokenizer_fn: Text → list of tokens; default LlamaIndex's.
        chat_store: A chat store for the window alone; excludes the database arguments.
        async_database_uri: As in stock; excludes `storage`.
        async_engine: As in stock; excludes `storage`.
        table_name: As in stock: prefix of our tables; excludes a `Storage`.
        db_schema: As in stock; excludes a `Storage`.

    Raises:
        ConfigurationError: Names the argument, its value and the way out, before anything is stored.
    """

    user_id: str | None = None
    agent_id: str | None = None
    reserve_tokens: int = 0
    budget: TokenBudget | None = None
    window_messages: int | None = None
    overflow: Literal["event", "raise"] = "event"
    delivery: Literal["background", "inline"] = "background"
    recall_position: Literal["system", "user"] = "system"
    claim_seconds: float = 30.0

    _shared: _Shared = PrivateAttr()
    _window: SessionWindow = PrivateAttr()
    _derived: bool = PrivateAttr(default=False)

    def __init__(
        self,
        *,
        storage: Storage | str | os.PathLike[str] | None = None,
        redaction: Redactor | Literal["default"] | None = "default",
        chat_store: AsyncDBChatStore | None = None,
        table_name: str | None = None,
        async_database_uri: str | None = None,
        async_engine: Any = None,
        db_schema: str | None = None,
        **fields: Any,
    ) -> None:
        places = Places(
            storage=storage,
            chat_store=chat_store if chat_store is not None else fields.pop("sql_store", None),
            table_name=table_name,
            async_database_uri=async_database_uri,
            async_engine=async_engine,
            db_schema=db_schema,
        )
        redactor = checked_redaction(redaction)
        checked = check_arguments(fields)
        found = resolve_places(places, checked)
        super().__init__(
            **{**checked.fields, "user_id": found.user_id, "session_id": found.session_id},
            sql_store=found.chat_store,
        )
        self._start(checked, found.storage, owns=found.owned, store=found.foreign_store, redactor=redactor)

    def _start(
        self,
        checked: Arguments,
        storage: Storage,
        *,
        owns: bool,
        store: AsyncDBChatStore | None,
        redactor: Redactor | None,
    ) -> None:
        counter = checked.counter
        limit = self.token_limit - self.reserve_tokens
        settings = Settings(
            token_limit=limit,
            window_share=self._window_tokens,
            insert_method=self.insert_method,
            template=self.memory_blocks_template,
            recall_position=self.recall_position,
            raise_on_overflow=self.overflow == "raise",
            shares=self.budget.parts if self.budget is not None else {},
        )
        self._shared = _Shared(
            storage=storage,
            owns_storage=owns,
            store=store,
            counter=counter,
            entries=EntryMaker(storage, counter, redactor),
            delivery=Delivery(
                storage,
                consumers_of(self.memory_blocks),
                counter=counter,
                claim_seconds=self.claim_seconds,
                agent_id=self.agent_id,
            ),
            contexts=ContextBuilder(storage, self.memory_blocks, counter, settings),
            forgetter=Forgetter(storage, self.memory_blocks),
        )
        self._window = self._make_window()

    @classmethod
    def class_name(cls) -> str:
        """Name used in LlamaIndex's serialisation."""
        return "TieredMemory"

    @classmethod
    def from_defaults(  # type: ignore[override]  # stock's arguments and ours
        cls,
        session_id: str | None = None,
        chat_history: list[ChatMessage] | None = None,
        token_limit: int = DEFAULT_TOKEN_LIMIT,
        memory_blocks: list[BaseMemoryBlock[Any]] | None = None,
        tokenizer_fn: Callable[[str], list[Any]] | None = None,
        chat_history_token_ratio: float = 0.7,
        token_flush_size: int | None = None,
        memory_blocks_template: RichPromptTemplate = DEFAULT_MEMORY_BLOCKS_TEMPLATE,
        insert_method: InsertMethod | Literal["system", "user"] = InsertMethod.SYSTEM,
        image_token_size_estimate: int = 256,
        audio_token_size_estimate: int = 256,
        video_token_size_estimate: int = 256,
        document_token_size_estimate: int = 2048,
        chat_store: AsyncDBChatStore | None = None,
        table_name: str | None = None,
        async_database_uri: str | None = None,
        async_engine: Any = None,
        db_schema: str | None = None,
        **ours: Any,
    ) -> Self:
        """Make a memory from the arguments of the class; `chat_history` is its first window, as after `set`."""
        if ours.get("budget") is None or token_limit != DEFAULT_TOKEN_LIMIT:
            ours["token_limit"] = token_limit  # else it was left out: the budget says it
        memory = cls(
            session_id=session_id,
            memory_blocks=memory_blocks or [],
            tokenizer_fn=tokenizer_fn,
            chat_history_token_ratio=chat_history_token_ratio,
            token_flush_size=token_flush_size,
            memory_blocks_template=memory_blocks_template,
            insert_method=insert_method,
            image_token_size_estimate=image_token_size_estimate,
            audio_token_size_estimate=audio_token_size_estimate,
            video_token_size_estimate=video_token_size_estimate,
            document_token_size_estimate=document_token_size_estimate,
            chat_store=chat_store,
            table_name=table_name,
            async_database_uri=async_database_uri,
            async_engine=async_engine,
            db_schema=db_schema,
            **ours,
        )
        if chat_history is not None:
            memory.set(chat_history)
        return memory

    # -- whose memory ----------------------------------------------------------------------------------------

    @property
    def storage(self) -> Storage:
        """Where everything is kept."""
        return self._shared.storage

    @property
    def scope(self) -> Scope:
        """Whose memory this is."""
        return Scope(self.session_id, self.user_id, self.agent_id)

    def for_session(self, session_id: str, user_id: str | None = None) -> Self:
        """Make a memory for another session with the same storage, blocks and settings, at next to no cost.

        Stock and third-party blocks hold what they learn in themselves, so that another user would be shown it: with
        such blocks, make a `TieredMemory` with blocks of its own per user.

        Args:
            session_id: The conversation.
            user_id: Another person; default the same.

        Returns:
            The memory; closing it leaves what is shared open.
        """
        scope = Scope(session_id, user_id if user_id is not None else self.user_id, self.agent_id)
        changed: dict[str, Any] = {"session_id": scope.session_id, "user_id": scope.user_id}
        if scope.user_id != self.user_id and self._shared.store is None:
            changed["sql_store"] = TieredChatStore(self.storage, user_id=scope.user_id)
        twin = self.model_copy(update=changed)
        twin._derived = True  # noqa: SLF001  # of the same class
        twin._window = twin._make_window()  # noqa: SLF001  # of the same class
        return twin

    def desk(self, block: str) -> Desk:
        """The records that one of the blocks keeps for this memory's owner, to be read and changed by hand.

        Args:
            block: Name of the block.

        Returns:
            The desk.

        Raises:
            ConfigurationError: No block of ours has that name.
        """
        ours = {b.name: b for b in self.memory_blocks if isinstance(b, TieredMemoryBlock)}
        if block not in ours:
            raise ConfigurationError(
                f"block={block!r:.100} was given.",
                allowed=f"This memory's blocks with records are: {', '.join(ours) or 'none'}.",
                remedy="Pass one of these names, or add the block to memory_blocks.",
            )
        return Desk(
            self.storage,
            self.scope,
            ours[block].key,
            self._shared.counter,
            redactor=self._shared.entries.redactor,
            consumers=self._shared.delivery.keys,
            per_session=ours[block].per_session,
        )

    def board(self, *, deduplicate: Duplicates = "id") -> MessageBoard:
        """This session's messages, to be looked up by cause, by role and by content, added and deleted.

        Args:
            deduplicate: What it refuses to add twice: the same `id` (default), or the same `content`.

        Returns:
            The board; keep it, as its index is read once.

        Raises:
            ConfigurationError: The window is kept in a chat store of your own, which knows no metadata.
        """
        if self._shared.store is not None:
            raise ConfigurationError(
                f"chat_store={type(self._shared.store).__name__} keeps this memory's window.",
                allowed="Causes and addresses of messages are kept in our own log only.",
                remedy="Leave chat_store out.",
            )

        async def put(messages: list[ChatMessage], uids: list[str], *, distinct: bool = False, **about: Any) -> int:
            return await self._put(messages, uids, self._shared.entries.describe(**about), distinct=distinct)

        redacted = self._shared.entries.redacted
        return MessageBoard(self.storage, self.scope, put=put, redacted=redacted, deduplicate=deduplicate)

    def view(
        self,
        name: str,
        *,
        watch: Cause | Iterable[Cause] = (),
        observe_all: bool = False,
        remember: bool = True,
    ) -> MemoryView:
        """What one of several roles sees of this session.

        Args:
            name: Of the role; messages are addressed to it by this name.
            watch: Causes, classes or names, whose messages concern the role.
            observe_all: Keep in its history also what reaches it without concerning it.
            remember: Keep a history at all; without one the view only filters.

        Returns:
            The view.
        """
        return MemoryView(
            self.board(),
            name,
            watch=watch,
            observe_all=observe_all,
            remember=remember,
            claim_seconds=self.claim_seconds,
        )

    def to_handle(self) -> dict[str, Any]:
        """Describe this memory as plain JSON data, for a context that is stored and taken up again.

        Returns:
            Address without secrets, scope and settings; no blocks, no models.
        """
        return {
            "version": HANDLE_VERSION,
            "storage": None if self.storage.private else self.storage.address,
            "table_name": self.storage.table_name,
            "db_schema": self.storage.db_schema,
            "session_id": self.session_id,
            "user_id": self.user_id,
            "agent_id": self.agent_id,
            "settings": {name: getattr(self, name) for name in _HANDLE_SETTINGS}
            | {
                "insert_method": self.insert_method.value,
                "budget": self.budget.to_dict() if self.budget is not None else None,
            },
        }

    @classmethod
    def from_handle(
        cls,
        handle: Mapping[str, Any],
        *,
        storage: Storage | str | None = None,
        memory_blocks: list[BaseMemoryBlock[Any]] | None = None,
        **settings: Any,
    ) -> Self:
        """Take up a memory again.

        Args:
            handle: From `to_handle`.
            storage: Where it is; default the handle's address, which holds no password.
            memory_blocks: The blocks, as a handle holds no code and no models.
            settings: Override the handle's.

        Returns:
            The memory.

        Raises:
            ConfigurationError: The handle is of a newer version, or its storage was private.
        """
        version = handle.get("version") if isinstance(handle, Mapping) else type(handle)
        if version != HANDLE_VERSION:
            raise ConfigurationError(
                f"A handle of version {version!r} was given.",
                allowed=f"This release reads version {HANDLE_VERSION}.",
                remedy="Install the release that wrote it, or make the memory anew from its ids.",
            )
        address = storage if storage is not None else handle["storage"]
        if address is None:
            raise ConfigurationError(
                "The handle of a memory with a private temporary storage was given without storage=.",
                allowed="A private storage ends with the memory that opened it.",
                remedy="Pass the same open Storage, or use a file or a database from the beginning.",
            )
        if storage is None and lacks_password(str(address)):
            raise ConfigurationError(
                f"The handle of a memory at {address!r} was given without storage=.",
                allowed="A handle holds no password.",
                remedy="Pass storage= with the whole URI, or an open Storage.",
            )
        if not isinstance(address, Storage):
            address = Storage(address, table_name=handle["table_name"], db_schema=handle["db_schema"])
        kept = {**handle["settings"]}
        if settings.get("budget") is not None:
            kept = {name: value for name, value in kept.items() if name not in {"token_limit", "reserve_tokens"}}
        memory = cls(
            storage=address,
            session_id=handle["session_id"],
            user_id=handle["user_id"],
            agent_id=handle["agent_id"],
            memory_blocks=memory_blocks or [],
            **{**kept, **settings},
        )
        memory._shared.owns_storage = not isinstance(storage, Storage)
        return memory

    # -- putting ---------------------------------------------------------------------------------------------

    async def aput(
        self,
        message: ChatMessage,
        *,
        created_at: datetime | None = None,
        sent_from: str = "",
        send_to: Sequence[str] = (),
        cause_by: Cause = "",
        uid: str | None = None,
    ) -> None:
        """Store a message; when this returns it is durable, whatever blocks or models do.

        Args:
            message: The message; it is copied.
            created_at: When it was said; naive means UTC; default now.
            sent_from: Who spoke.
            send_to: Whom it addresses.
            cause_by: What made it: a name, or the class of an action.
            uid: Your own id: repeating a put with it stores nothing twice.

        Raises:
            InvalidMessageError: It cannot be stored; nothing was.
        """
        made = self._shared.entries.describe(created_at, sent_from, send_to, cause_by)
        await self._put([message], [uid], made)

    async def aput_messages(
        self,
        messages: list[ChatMessage],
        *,
        created_at: datetime | None = None,
        sent_from: str = "",
        send_to: Sequence[str] = (),
        cause_by: Cause = "",
        uids: Sequence[str | None] | None = None,
    ) -> None:
        """Store messages in one transaction, all or none; an empty list changes nothing.

        The arguments are those of `aput` and hold for all messages; `uids` has one id per message.
        """
        made = self._shared.entries.describe(created_at, sent_from, send_to, cause_by)
        await self._put(messages, uids, made)

    async def _put(
        self,
        messages: Sequence[ChatMessage],
        uids: Sequence[str | None] | None,
        made: Any,
        *,
        distinct: bool = False,
    ) -> int:
        """Store messages, and see to what follows from that; returns how many were new."""
        prepared = await self._shared.entries.make(messages, uids, made)
        if not prepared.entries:
            return 0
        await self._shared.delivery.catch_up(self._key)
        await self._shared.delivery.attach(self._key)
        failpoints.reach("put.prepared")
        result = await self._window.append(prepared.entries, self._shared.delivery.keys, distinct=distinct)
        failpoints.reach("put.stored")
        self._remember_raw(prepared.raw, new_turn=prepared.new_turn)
        if not self._shared.stuck.get(self._key, True) and any(e.role not in RESULT_ROLES for e in prepared.entries):
            del self._shared.stuck[self._key]
        emit(MessagesPut(session_id=self.session_id, stored=result.stored, active_tokens=result.active_tokens))
        await self._after_write(result.active_tokens)
        return result.stored

    async def aset(self, messages: list[ChatMessage]) -> None:
        """Make the window hold these messages: what matches keeps its place, what is dropped is archived.

        Args:
            messages: The whole window, oldest first; memory text that `aget` put into it is recognised.
        """
        prepared = await self._shared.entries.make(messages, None, self._shared.entries.describe())
        await self._shared.delivery.attach(self._key)
        result = await self._window.replace(prepared.entries, self._shared.delivery.keys, self._window_tokens)
        self._remember_raw(await self._kept_raw(prepared), new_turn=True)
        await self._after_write(result.active_tokens)

    async def _kept_raw(self, prepared: Prepared) -> dict[str, ChatMessage]:
        """The running turn as it was said, by the ids that it has in the log: messages that matched keep theirs."""
        if not prepared.raw:
            return {}
        stored = (await self._window.read()).messages
        # The window ends with what was wanted.
        pairs = zip(reversed(stored), reversed(prepared.entries), strict=False)
        return {row.id: prepared.raw[entry.uid] for row, entry in pairs if entry.uid in prepared.raw}

    async def _after_write(self, active_tokens: int) -> None:
        self._shared.forgetter.tell_waiting()
        if active_tokens > self._window_tokens or self._window_bound[0] is not None:
            await self._postponable(self._flush_window())
        if self.delivery == "inline":
            await self._postponable(self._shared.delivery.deliver(self._key))
            return
        self._shared.delivery.drain_once(self.user_id or "")
        self._shared.delivery.schedule(self._key)

    async def _postponable(self, work: Awaitable[object]) -> None:
        """Do what the next put does else: the messages are stored, and who is told to repeat stores them twice."""
        try:
            await work
        except StorageError as error:
            about = {"session_id": self.session_id, "error": type(error).__name__}
            _logger.warning("stored, the rest is left to the next put", extra=about)

    async def _flush_window(self) -> None:
        if self._key in self._shared.stuck:
            return  # what stays alone is too large; nothing changes before the next turn, or group without turns
        async with self._shared.turn(self._key):
            await self._flush_now()

    async def _flush_now(self) -> None:
        window = await self._window.read()
        window_messages, flush_messages = self._window_bound
        seqs = plan_flush(
            [window_row(stored.seq, stored.message, stored.tokens) for stored in window.messages],
            limit_tokens=self._window_tokens,
            flush_tokens=self.token_flush_size,
            window_messages=window_messages,
            flush_messages=flush_messages,
        )
        if not seqs:
            if sum(stored.tokens for stored in window.messages) > self._window_tokens:
                turns = any(stored.role == MessageRole.USER for stored in window.messages)
                self._shared.stuck[self._key] = turns
            return
        # A damaged row leaves with its neighbours, or what waits for a flush would wait behind it for ever.
        damaged = [seq for seq in window.damaged if seq < seqs[-1]]
        failpoints.reach("flush.planned")
        archived = await self._window.archive([*damaged, *seqs])
        failpoints.reach("flush.archived")
        emit(WindowFlushed(session_id=self.session_id, archived=archived))

    async def _manage_queue(self) -> None:
        await self._flush_window()

    def _remember_raw(self, raw: Mapping[str, ChatMessage], *, new_turn: bool) -> None:
        """Keep the running turn as it was said, in RAM: an agent can use a key that it was just given."""
        shared = self._shared
        if new_turn:
            shared.raw.pop(self._key, None)
            shared.stuck.pop(self._key, None)
        if raw:
            shared.raw.setdefault(self._key, {}).update(raw)
            while len(shared.raw) > _RAW_SESSIONS:
                del shared.raw[next(iter(shared.raw))]

    # -- getting ---------------------------------------------------------------------------------------------

    async def aget(
        self,
        input: str | ChatMessage | None = None,  # noqa: A002  # stock's name
        *,
        messages: list[ChatMessage] | None = None,
        initial_token_count: int = 0,
        **block_kwargs: Any,
    ) -> list[ChatMessage]:
        """Return the context for the current request, within the token limit as rendered.

        Args:
            input: The request as text or message; default the newest user message.
            messages: Or messages for the blocks to look at, the newest user message being the request.
            initial_token_count: Tokens that are spoken for already.
            block_kwargs: Passed on to stock and third-party blocks.

        Returns:
            Messages, yours to change.

        Raises:
            BudgetError: What must be shown does not fit, and `overflow="raise"`.
        """
        request = await self._request(input, messages, initial_token_count, block_kwargs)
        return await self._shared.contexts.messages(request)

    async def aexplain(
        self,
        input: str | ChatMessage | None = None,  # noqa: A002  # stock's name
        *,
        messages: list[ChatMessage] | None = None,
        **block_kwargs: Any,
    ) -> ContextReport:
        """Say what `aget` with these arguments returns and why: tokens per part, what was left out, which leg found it.

        Args:
            input: See `aget`.
            messages: See `aget`.
            block_kwargs: See `aget`.

        Returns:
            The report, with the context in `messages`.
        """
        request = await self._request(input, messages, 0, block_kwargs)
        contexts = self._shared.contexts
        return contexts.report(request, await contexts.build(request))

    async def _request(
        self,
        asked: str | ChatMessage | None,
        messages: list[ChatMessage] | None,
        initial_token_count: int,
        block_kwargs: Mapping[str, Any],
    ) -> Request:
        check_request(asked, messages, initial_token_count)
        await self._shared.delivery.catch_up(self._key)
        self._shared.delivery.drain_once(self.user_id or "")
        await self._shared.delivery.freshen(self._key)
        raw = self._shared.raw.get(self._key, {})
        window = await self._window.read()
        self._shared.forgetter.tell_waiting()  # the first read has opened the storage
        return make_request(
            self.scope,
            self._shared.contexts.views.of(self.scope, window, raw),
            asked=asked,
            messages=messages,
            redact=self._shared.entries.redacted,
            limit=max(0, self.token_limit - self.reserve_tokens - initial_token_count),
            now=self.storage.clock(),
            block_kwargs=block_kwargs,
        )

    async def aget_all(self, status: MessageStatus | None = None) -> list[ChatMessage]:
        """All messages of the session; with a status, those in the window or behind it."""
        return [stored.message for stored in await self.amessages(status)]

    async def amessages(self, status: MessageStatus | None = None) -> list[StoredMessage]:
        """Like `aget_all`, with ids, times, tokens and metadata."""
        return await self._window.history(status)

    async def areset(self, status: MessageStatus | None = None) -> None:
        """Empty the window and the session's history; what blocks have learnt stays.

        Args:
            status: Only the window (`active`) or only what is behind it (`archived`).
        """
        await self._window.clear(status)
        self._remember_raw({}, new_turn=True)
        if self.delivery == "background":
            self._shared.delivery.schedule(self._key)

    # -- by hand ---------------------------------------------------------------------------------------------

    async def aremember(
        self,
        content: str,
        metadata: Mapping[str, Any] | None = None,
        partition: str | None = None,
        *,
        block: str | None = None,
    ) -> str:
        """Store a note that no message said; it is recalled like one.

        Args:
            content: The note; secrets are taken out.
            metadata: Anything that can be written as JSON, for `arecall(filter=…)`.
            partition: One of the block's partitions; default by its classifier.
            block: Name of the vector block; default the first one.

        Returns:
            Id of the note.

        Raises:
            InvalidMessageError: The note has no words, or its metadata cannot be written.
            ConfigurationError: There is no such block or partition.
        """
        vector, desk = self._vector(block)
        return await vector.remember(desk, content, metadata, partition)

    async def arecall(
        self,
        query: str,
        top_k: int = 5,
        partitions: Collection[str] | None = None,
        filter: Mapping[str, Any] | None = None,  # noqa: A002  # the field's word for it
        *,
        block: str | None = None,
    ) -> list[Recollection]:
        """Look up what the owner's messages and notes say about something.

        Args:
            query: What to look for; without any word nothing is found.
            top_k: At most so many, after partitions and filter; default 5.
            partitions: Only these.
            filter: Metadata that must be equal, such as `{"role": "user"}`; see `Recollection.metadata`.
            block: Name of the vector block; default the first one.

        Returns:
            Best first, with distances.

        Raises:
            ConfigurationError: There is no such block, or `top_k` is no whole number from 1.
        """
        if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
            raise ConfigurationError(
                f"top_k={top_k!r:.100} was given.", allowed="It is a whole number from 1.", remedy="Pass such a number."
            )
        await self._shared.delivery.freshen(self._key)
        vector, desk = self._vector(block)
        return await vector.find(desk, query, top_k, partitions, filter)

    def _vector(self, name: str | None) -> tuple[VectorMemoryBlock, Desk]:
        for block in self.memory_blocks:
            if isinstance(block, VectorMemoryBlock) and name in (None, block.name):
                return block, self.desk(block.name)
        raise ConfigurationError(
            f"block={name!r:.100} was given." if name is not None else "This memory has no vector block.",
            allowed="Notes are kept by a VectorMemoryBlock of this memory.",
            remedy="Add a VectorMemoryBlock to memory_blocks, or pass the name of the one that is there.",
        )

    # -- delivery --------------------------------------------------------------------------------------------

    async def aflush(self) -> FlushReport:
        """Let all blocks absorb this session, and what waits in the user's other sessions, now.

        Returns:
            Per block what was absorbed and what still waits, and why. Never raises for what a block does.
        """
        keys = [self._key]
        if self.user_id is not None:
            others = await self.storage.log.behind(self.user_id, self._shared.delivery.keys)
            keys += [(s.user_id, s.session_id) for s in others if s.session_id != self.session_id]
        return await self._shared.delivery.flush(keys)

    async def adead_letters(self) -> list[DeadLetter]:
        """Ranges of the user's sessions that a block could not absorb."""
        only = None if self.user_id is not None else self.session_id
        return await self.storage.cursors.dead(self.user_id or "", only)

    async def areplay(self) -> FlushReport:
        """Try the dead letters again; those that succeed are gone."""
        return await self._shared.delivery.replay(await self.adead_letters(), self.user_id or "")

    # -- forgetting ------------------------------------------------------------------------------------------

    async def aforget(
        self,
        *,
        scope: ForgetScope | None = None,
        ids: Sequence[str] | None = None,
        before: datetime | None = None,
        filter: ForgetFilter | None = None,  # noqa: A002  # as in other memories
        derived: Derived = "drop",
    ) -> ForgetReceipt:
        """Forget messages and what was learnt from them, and prove it: everything is read again afterwards.

        What is given must all hold. A crash in the middle loses nothing of the order: the next start finishes it.

        Args:
            scope: `session`: in this session only. `user`: in all sessions of the user. Left out: whatever is
                the user's, or the session's when there is no user.
            ids: Messages and records with these ids.
            before: What was said before this moment; naive means UTC.
            filter: What matches.
            derived: A record that came from a forgotten message and from others too is dropped either way;
                `rederive` lets its block read the others again.

        Returns:
            Rows that are gone and rows that are left, per store.

        Raises:
            ConfigurationError: Nothing was said, or something is not what it may be; nothing was forgotten.
        """
        selection = checked_selection(
            self.user_id or "",
            self.session_id,
            scope=scope,
            ids=ids,
            before=before,
            filter=filter,
            derived=derived,
        )
        shared = self._shared
        receipt, moved_back = await shared.forgetter.forget(replace(selection, external=shared.forgetter.external))
        window = await self._window.forget(selection)
        for key in [key for key in shared.raw if key[0] == selection.user_id]:
            if selection.session_id in {None, key[1]}:
                del shared.raw[key]
        shared.contexts.drop_remembered()
        if moved_back:
            await self._read_again(selection)
        return receipt if window is None else replace(receipt, entries=(*receipt.entries, window))

    async def _read_again(self, selection: Selection) -> None:
        keys = [self._key]
        if selection.session_id is None:
            behind = await self.storage.log.behind(selection.user_id, self._shared.delivery.keys)
            keys = [(session.user_id, session.session_id) for session in behind]
        for key in keys:
            if self.delivery == "inline":
                await self._postponable(self._shared.delivery.deliver(key))
            else:
                self._shared.delivery.schedule(key)

    # -- moving ----------------------------------------------------------------------------------------------

    async def aexport(
        self, target: Target, *, scope: ForgetScope | None = None, progress: Progress | None = None
    ) -> TransferReport:
        """Write everything that is kept as JSON Lines, for a backup or another database.

        What blocks hold elsewhere, such as in a vector store of yours, is not in it.

        Args:
            target: Path of a file, replaced in one step, or a stream of bytes.
            scope: `user`: all sessions of the user, the default when there is one. `session`: this session, and
                what was learnt from it.
            progress: Gets the lines done and the lines in all, perhaps from another thread.

        Returns:
            What was written.

        Raises:
            ConfigurationError: Names the argument, its value and the way out.
        """
        asked = checked_selection(
            self.user_id or "", self.session_id, scope=scope or ("session" if self.user_id is None else "user")
        )
        return await self.storage.export_to(target, asked.user_id, asked.session_id, progress)

    async def aimport(self, source: Target, *, progress: Progress | None = None) -> TransferReport:
        """Take in what `aexport` wrote, here or elsewhere, in one transaction; twice is the same as once.

        Args:
            source: Path of a file, or a stream of bytes.
            progress: See `aexport`.

        Returns:
            What was stored, and how many sessions were here already.

        Raises:
            ConfigurationError: The file is not whole, is somebody else's, or one of its sessions holds other messages
                here; nothing was stored.
        """
        only = None if self.user_id is not None else self.session_id
        return await self.storage.import_from(source, self.user_id or "", only, progress)

    async def areindex(
        self, *, again: bool = False, progress: ReindexProgress | None = None
    ) -> tuple[ReindexReport, ...]:
        """Embed everything that this user's blocks remember again, each with its own `embed_model`.

        For a memory that was built with another embedding model than its records; see `Storage.reindex`. Vectors in
        a `vector_store` of yours stay as they are.

        Args:
            again: Embed also what has a vector of the model already.
            progress: Gets the records done and the records in all, for one model after the other.

        Returns:
            One report per model; none when no block has one.
        """
        models: dict[str, tuple[BaseEmbedding, set[str]]] = {}
        for block in self.memory_blocks:
            model = getattr(block, "embed_model", None)
            elsewhere = getattr(block, "vector_store", None) is not None
            if isinstance(block, TieredMemoryBlock) and isinstance(model, BaseEmbedding) and not elsewhere:
                models.setdefault(model.model_name, (model, set()))[1].add(block.key)
        only = None if self.user_id is not None else self.session_id
        return tuple(
            [
                await self.storage.reindex(
                    model, user_id=self.user_id, session_id=only, blocks=keys, again=again, progress=progress
                )
                for model, keys in models.values()
            ]
        )

    async def aclose(self, *, flush: bool = False) -> None:
        """Stop background work; close the storage if this memory opened it. Nothing is lost: the next start goes on.

        Args:
            flush: Let all blocks absorb what waits before, which may call models.
        """
        if self._derived:
            if flush:
                await self.aflush()
            return
        if flush and not self.storage.closed:
            await self.aflush()
        await self._shared.delivery.aclose()
        await self._shared.forgetter.aclose()
        if self._shared.owns_storage:
            await self.storage.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # -- for scripts, threads and notebooks ------------------------------------------------------------------

    def get(
        self,
        input: str | ChatMessage | None = None,  # noqa: A002  # stock's name
        *,
        messages: list[ChatMessage] | None = None,
        initial_token_count: int = 0,
        **block_kwargs: Any,
    ) -> list[ChatMessage]:
        """See `aget`."""
        return portal.run(self.aget(input, messages=messages, initial_token_count=initial_token_count, **block_kwargs))

    def get_all(self, status: MessageStatus | None = None) -> list[ChatMessage]:
        """See `aget_all`."""
        return portal.run(self.aget_all(status))

    def put(self, message: ChatMessage, **about: Any) -> None:
        """See `aput`."""
        portal.run(self.aput(message, **about))

    def put_messages(self, messages: list[ChatMessage], **about: Any) -> None:
        """See `aput_messages`."""
        portal.run(self.aput_messages(messages, **about))

    def set(self, messages: list[ChatMessage]) -> None:
        """See `aset`."""
        portal.run(self.aset(messages))

    def reset(self) -> None:
        """See `areset`."""
        portal.run(self.areset())

    def explain(self, input: str | ChatMessage | None = None, **block_kwargs: Any) -> ContextReport:  # noqa: A002  # stock's name
        """See `aexplain`."""
        return portal.run(self.aexplain(input, **block_kwargs))

    def messages(self, status: MessageStatus | None = None) -> list[StoredMessage]:
        """See `amessages`."""
        return portal.run(self.amessages(status))

    def remember(self, content: str, *args: Any, **kwargs: Any) -> str:
        """See `aremember`."""
        return portal.run(self.aremember(content, *args, **kwargs))

    def recall(self, query: str, *args: Any, **kwargs: Any) -> list[Recollection]:
        """See `arecall`."""
        return portal.run(self.arecall(query, *args, **kwargs))

    def flush(self) -> FlushReport:
        """See `aflush`."""
        return portal.run(self.aflush())

    def forget(self, **what: Any) -> ForgetReceipt:
        """See `aforget`."""
        return portal.run(self.aforget(**what))

    def export_to(self, target: Target, **how: Any) -> TransferReport:
        """See `aexport`."""
        return portal.run(self.aexport(target, **how))

    def import_from(self, source: Target, **how: Any) -> TransferReport:
        """See `aimport`."""
        return portal.run(self.aimport(source, **how))

    def reindex(self, **how: Any) -> tuple[ReindexReport, ...]:
        """See `areindex`."""
        return portal.run(self.areindex(**how))

    def close(self, *, flush: bool = False) -> None:
        """See `aclose`."""
        portal.run(self.aclose(flush=flush))

    # -- names that LlamaIndex reaches for -------------------------------------------------------------------

    def _estimate_token_count(
        self, message_or_blocks: str | ChatMessage | list[ChatMessage] | list[ContentBlock]
    ) -> int:
        counter = self._shared.counter
        if isinstance(message_or_blocks, str):
            return counter.text(message_or_blocks)
        if isinstance(message_or_blocks, ChatMessage):
            return counter.message(message_or_blocks)
        return sum(
            counter.message(part) if isinstance(part, ChatMessage) else counter.block(part)
            for part in message_or_blocks
        )

    async def _get_memory_blocks_content(
        self,
        chat_history: list[ChatMessage],
        input: str | ChatMessage | None = None,  # noqa: A002  # stock's name
        **block_kwargs: Any,
    ) -> dict[str, Any]:
        given = [*chat_history]
        if input is not None:
            given.append(input if isinstance(input, ChatMessage) else ChatMessage(role=MessageRole.USER, content=input))
        request = await self._request(None, given, 0, block_kwargs)
        return await self._shared.contexts.raw_contents(request)

    # -- inside ----------------------------------------------------------------------------------------------

    @property
    def _key(self) -> Key:
        return self.user_id or "", self.session_id

    @property
    def _window_tokens(self) -> int:
        if self.budget is not None:
            return self.budget.window_tokens(self.chat_history_token_ratio)
        return int((self.token_limit - self.reserve_tokens) * self.chat_history_token_ratio)

    @property
    def _window_bound(self) -> tuple[int | None, int]:
        """Most messages that the memory or a block wants in the window, and how many leave together."""
        ours = [block.window_bound for block in self.memory_blocks if isinstance(block, TieredMemoryBlock)]
        bounds = [bound for bound in ours if bound is not None]
        most = [bound[0] for bound in bounds] + ([self.window_messages] if self.window_messages is not None else [])
        return min(most, default=None), max((bound[1] for bound in bounds), default=1)

    def _make_window(self) -> SessionWindow:
        shared = self._shared
        if shared.store is not None:
            return StoreWindow(shared.store, shared.storage, self.scope, shared.counter)
        return LogWindow(shared.storage, self.scope, shared.counter)


_HANDLE_SETTINGS = (
    "token_limit", "reserve_tokens", "chat_history_token_ratio", "token_flush_size", "window_messages", "overflow",
    "delivery", "recall_position", "claim_seconds", "image_token_size_estimate", "audio_token_size_estimate",
    "video_token_size_estimate", "document_token_size_estimate",
)  # fmt: skip
