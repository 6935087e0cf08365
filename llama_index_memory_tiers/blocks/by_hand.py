"""Base of blocks that are written by hand: they take nothing from the chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index_memory_tiers.blocks.base import TieredMemoryBlock
from llama_index_memory_tiers.blocks.desk import Desk, Holder
from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.records import Batch, Changes, Record
from llama_index_memory_tiers.storage import OwnerReader


class HandWrittenBlock(TieredMemoryBlock):
    """A block whose records come from calls of `of(memory)`, not from messages; it has no cursor."""

    accept_short_term_memory: bool = False

    async def prepare(self, batch: Batch, reader: OwnerReader, counter: TokenCounter) -> None:  # noqa: ARG002
        """Nothing is taken from messages."""
        return

    def merge(self, draft: Any, records: Sequence[Record]) -> Changes:  # noqa: ARG002
        """Nothing is drafted."""
        return Changes()

    def _desk(self, memory: Holder) -> Desk:
        if not callable(getattr(memory, "desk", None)):
            raise ConfigurationError(
                f"memory={type(memory).__name__} was given.",
                allowed=f"{type(self).__name__} is written through a TieredMemory that has it among its blocks.",
                remedy="Pass that memory; LlamaIndex's own Memory does not know whose records these are.",
            )
        return memory.desk(self.name)
