"""ForeignBlock: any other LlamaIndex memory block as a consumer of the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers.blocks.absorbing import Trigger
from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.records import Batch, Changes, Reads, Record
from llama_index_memory_tiers.storage import OwnerReader


@dataclass(frozen=True, slots=True)
class ForeignBlock:
    """Hands batches to a stock or third-party block: copies, at least once; its durability is its own.

    Args:
        block: The block.
        idle_seconds: Silence after which it is given everything.
        timeout_seconds: Bound of one `aput`.
    """

    block: BaseMemoryBlock[Any]
    idle_seconds: float = 60.0
    timeout_seconds: float = 60.0
    absorb_on: frozenset[Trigger] = frozenset({"flush", "idle"})
    absorb_every: int = 1
    batch_tokens: int = 8000
    backfill: bool = False
    per_session: bool = True
    uses_model: bool = True  # it may; so an old session is not fed to it unasked

    @property
    def key(self) -> str:
        """Name of the cursor."""
        return self.block.name

    async def prepare(self, batch: Batch, reader: OwnerReader, counter: TokenCounter) -> None:  # noqa: ARG002
        """Give it the batch; a failure is retried with the same messages."""
        if batch.messages:
            await self.block.aput(
                [stored.message for stored in batch.messages],
                from_short_term_memory=True,
                session_id=batch.scope.session_id,
            )

    def reads(self, draft: Any) -> Reads:  # noqa: ARG002
        """It has no records."""
        return Reads()

    def merge(self, draft: Any, records: Sequence[Record]) -> Changes:  # noqa: ARG002
        """It has no records."""
        return Changes()
