"""ForeignBlock: any other LlamaIndex memory block as a consumer of the log."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers.blocks.consumer import Trigger
from llama_index_memory_tiers.budget import TokenCounter
from llama_index_memory_tiers.records import Batch, Changes, Forgotten, Reads, Record
from llama_index_memory_tiers.storage import OwnerReader


def for_one_question(block: BaseMemoryBlock[Any]) -> BaseMemoryBlock[Any]:
    """Keep a question from leaving its filter behind: stock's vector block writes the session into `query_kwargs`.

    Args:
        block: A stock or third-party block.

    Returns:
        A shallow copy with a `query_kwargs` of its own, or the block itself when it has none: other blocks keep in
        themselves what they have learnt.
    """
    kwargs = vars(block).get("query_kwargs")
    return block if kwargs is None else block.model_copy(update={"query_kwargs": copy.deepcopy(kwargs)})


@dataclass(frozen=True, slots=True)
class ForeignBlock:
    """Hands batches to a stock or third-party block: copies, at least once; its durability is its own.

    What the block keeps in itself is shared by all who use it: users need blocks of their own.

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
    hold_back: int = 0
    batch_tokens: int = 8000
    backfill: bool = False
    per_session: bool = True
    uses_model: bool = True  # it may; so an old session is not fed to it unasked
    holds_external_data: bool = False  # what it keeps is its own, and a receipt names it as out of reach

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

    async def forget(self, forgotten: Forgotten) -> None:
        """It cannot be told."""
