"""Synchronous calls: one line each."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import LLM
from llama_index.core.storage.chat_store.base_db import MessageStatus

from llama_index_memory_tiers.events import (
    ContextReport,
    FlushReport,
    ForgetReceipt,
    MaintenanceReport,
)
from llama_index_memory_tiers.listing import data_frame
from llama_index_memory_tiers.memory.keeping import Keeping
from llama_index_memory_tiers.memory.looking import Looking
from llama_index_memory_tiers.memory.recalling import Recalling
from llama_index_memory_tiers.portal import portal
from llama_index_memory_tiers.provenance import Provenance
from llama_index_memory_tiers.records import Recollection, StoredMessage
from llama_index_memory_tiers.storage import ReindexReport
from llama_index_memory_tiers.storage.transfer import Target, TransferReport


class Scripts(Recalling, Looking, Keeping):
    """The same without `await`, for scripts, threads and notebooks."""

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

    def why(self, id: str) -> Provenance:  # noqa: A002  # the field's word for it
        """See `awhy`."""
        return portal.run(self.awhy(id))

    def to_dataframe(self) -> Any:
        """All that is kept for the user, or without one for the session, as a pandas DataFrame; see `alist`.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(portal.run(self.alist()))

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

    def maintain(self, *, dry_run: bool = True) -> MaintenanceReport:
        """See `amaintain`."""
        return portal.run(self.amaintain(dry_run=dry_run))

    def add_memory(self, user_message: str, assistant_message: str, timestamp: datetime | None = None) -> None:
        """See `aadd_memory`."""
        portal.run(self.aadd_memory(user_message, assistant_message, timestamp))

    def get_response(self, user_message: str, assistant_message_context: str = "", *, llm: LLM | None = None) -> str:
        """See `aget_response`."""
        return portal.run(self.aget_response(user_message, assistant_message_context, llm=llm))

    def reindex(self, **how: Any) -> tuple[ReindexReport, ...]:
        """See `areindex`."""
        return portal.run(self.areindex(**how))

    def close(self, *, flush: bool = False) -> None:
        """See `aclose`."""
        portal.run(self.aclose(flush=flush))
