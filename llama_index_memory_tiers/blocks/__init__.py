"""Memory blocks: what a memory keeps beside its window, and how it comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.memory import StaticMemoryBlock as CoreStaticMemoryBlock
from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers.blocks.absorbing import Consumer
from llama_index_memory_tiers.blocks.base import Query, TieredMemoryBlock
from llama_index_memory_tiers.blocks.fact_proposals import FactProposal
from llama_index_memory_tiers.blocks.fact_values import Fact
from llama_index_memory_tiers.blocks.facts import FactExtractionMemoryBlock
from llama_index_memory_tiers.blocks.foreign import ForeignBlock
from llama_index_memory_tiers.blocks.static import StaticMemoryBlock
from llama_index_memory_tiers.blocks.vector import VectorMemoryBlock

__all__ = [
    "Fact",
    "FactExtractionMemoryBlock",
    "FactProposal",
    "Query",
    "StaticMemoryBlock",
    "TieredMemoryBlock",
    "VectorMemoryBlock",
    "consumers_of",
]


def consumers_of(blocks: Sequence[BaseMemoryBlock[Any]]) -> list[Consumer]:
    """The blocks that absorb messages; stock and third-party ones through an adapter.

    Args:
        blocks: All blocks of a memory.

    Returns:
        Consumers; static blocks and those that accept nothing are missing.
    """
    absorbing = [
        block for block in blocks if block.accept_short_term_memory and not isinstance(block, CoreStaticMemoryBlock)
    ]
    return [block if isinstance(block, TieredMemoryBlock) else ForeignBlock(block) for block in absorbing]
