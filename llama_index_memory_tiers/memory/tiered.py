"""TieredMemory, put together from its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory.memory import (
    DEFAULT_MEMORY_BLOCKS_TEMPLATE,
    DEFAULT_TOKEN_LIMIT,
    BaseMemoryBlock,
    InsertMethod,
)
from llama_index.core.prompts import RichPromptTemplate
from llama_index.core.storage.chat_store.base_db import AsyncDBChatStore
from typing_extensions import Self

from llama_index_memory_tiers.budget import DOCUMENT_TOKENS, MEDIA_TOKENS
from llama_index_memory_tiers.checks import check_kind
from llama_index_memory_tiers.memory.scripts import Scripts


class TieredMemory(Scripts):
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
        preset: `survey` sets blocks, budget and retention to the numbers of the survey of agent memory; its summaries
            and its embeddings come from `Settings`, if you have set any there.
        chat_history_token_ratio: Share of the limit above which old turns leave the window, 0 to 1; default 0.7.
        token_flush_size: About so many tokens leave at once; default a tenth of the limit, at most 3 000 and
            half of what the window may hold.
        window_messages: Also flush above so many messages; default no bound.
        memory_blocks: What remembers; names are unique. Stock and third-party blocks hold what they learn in
            themselves, for all who share them: make those per user.
        insert_method: Put the memory into the `system` message or into the newest `user` message.
        recall_position: With `user`, only what changes from turn to turn stands beside the newest user message.
        overflow: When priority 0 and the newest user message alone exceed the limit: `event` returns exactly these,
            `raise` raises `BudgetError`.
        delivery: Blocks absorb in the `background`, or `inline` before a put returns.
        claim_seconds: How long the work of a dead worker waits for another; default 30.
        retention: Rules by which `amaintain` puts records aside, such as `[ByAge(days=365)]`; default none.
        maintain_every: Seconds between two maintenances of a user, beside the chat; default `None`, never.
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
        image_token_size_estimate: int = MEDIA_TOKENS,
        audio_token_size_estimate: int = MEDIA_TOKENS,
        video_token_size_estimate: int = MEDIA_TOKENS,
        document_token_size_estimate: int = DOCUMENT_TOKENS,
        chat_store: AsyncDBChatStore | None = None,
        table_name: str | None = None,
        async_database_uri: str | None = None,
        async_engine: Any = None,
        db_schema: str | None = None,
        **ours: Any,
    ) -> Self:
        """Make a memory from the arguments of the class; `chat_history` is its first window, as after `set`."""
        check_kind("chat_history", chat_history, list[ChatMessage] | None)
        said_elsewhere = ours.get("budget") is not None or ours.get("preset") is not None
        if not said_elsewhere or token_limit != DEFAULT_TOKEN_LIMIT:
            ours["token_limit"] = token_limit
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
