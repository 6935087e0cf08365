"""The arguments of a memory, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal

from llama_index.core.memory import Memory
from llama_index.core.storage.chat_store.base_db import AsyncDBChatStore
from pydantic import PrivateAttr

from llama_index_memory_tiers.arguments import (
    Arguments,
    Places,
    check_arguments,
    resolve_places,
)
from llama_index_memory_tiers.blocks import TieredMemoryBlock, consumers_of
from llama_index_memory_tiers.blocks.desk import Desk
from llama_index_memory_tiers.budget import TokenBudget
from llama_index_memory_tiers.checks import checked
from llama_index_memory_tiers.context import ContextBuilder, Settings
from llama_index_memory_tiers.delivery import Delivery
from llama_index_memory_tiers.entries import EntryMaker
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.events import (
    MaintenanceReport,
)
from llama_index_memory_tiers.forgetting import Forgetter
from llama_index_memory_tiers.maintenance import Upkeep, maintain
from llama_index_memory_tiers.memory.shared import Shared
from llama_index_memory_tiers.pacing import Key
from llama_index_memory_tiers.presets import with_preset
from llama_index_memory_tiers.records import Scope
from llama_index_memory_tiers.redaction import Redactor, checked_redaction
from llama_index_memory_tiers.retention import RetentionPolicy
from llama_index_memory_tiers.storage import Storage
from llama_index_memory_tiers.windows import LogWindow, SessionWindow, StoreWindow


class MemoryBase(Memory):
    """Settings of a memory, and what its parts share; see `TieredMemory`."""

    user_id: str | None = None
    agent_id: str | None = None
    reserve_tokens: int = 0
    budget: TokenBudget | None = None
    window_messages: int | None = None
    overflow: Literal["event", "raise"] = "event"
    delivery: Literal["background", "inline"] = "background"
    recall_position: Literal["system", "user"] = "system"
    claim_seconds: float = 30.0
    retention: tuple[RetentionPolicy, ...] = ()
    maintain_every: float | None = None

    _shared: Shared = PrivateAttr()
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
        fields = with_preset(fields)
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
        found = resolve_places(places, checked, redactor)
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
        self._shared = Shared(
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
            upkeep=Upkeep(self.maintain_every, storage.now),
        )
        self._window = self._make_window()

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """What `repr` shows: whose memory it is, its limits, its blocks by name and where it keeps them; no texts."""
        for name in ("user_id", "session_id", "agent_id"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)
        yield "token_limit", self.token_limit
        if self.reserve_tokens:
            yield "reserve_tokens", self.reserve_tokens
        yield "memory_blocks", [block.name for block in self.memory_blocks]
        yield "storage", self.storage.address

    def __str__(self) -> str:
        return repr(self)

    @property
    def storage(self) -> Storage:
        """Where everything is kept."""
        return self._shared.storage

    @property
    def scope(self) -> Scope:
        """Whose memory this is."""
        return Scope(self.session_id, self.user_id, self.agent_id)

    @checked
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

    @checked
    async def amaintain(self, *, dry_run: bool = True) -> MaintenanceReport:
        """Put aside what the rules in `retention` let go; nothing is deleted, and a desk can restore it.

        Args:
            dry_run: Only say what would leave and why (default), and change nothing.

        Returns:
            What leaves, or would.
        """
        blocks = [block for block in self.memory_blocks if isinstance(block, TieredMemoryBlock)]
        return await maintain(self.storage, blocks, self.scope, self.retention, dry_run=dry_run)

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
