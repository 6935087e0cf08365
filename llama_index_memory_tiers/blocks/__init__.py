"""Memory blocks: what a memory keeps beside its window, and how it comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.memory import StaticMemoryBlock as CoreStaticMemoryBlock
from llama_index.core.memory.memory import BaseMemoryBlock

from llama_index_memory_tiers.blocks.base import Query, TieredMemoryBlock
from llama_index_memory_tiers.blocks.consumer import Consumer
from llama_index_memory_tiers.blocks.episodic.block import EpisodicMemoryBlock
from llama_index_memory_tiers.blocks.episodic.episodes import Episode, EpisodeStep, ToolUse
from llama_index_memory_tiers.blocks.facts.block import FactExtractionMemoryBlock
from llama_index_memory_tiers.blocks.facts.proposals import FactProposal
from llama_index_memory_tiers.blocks.facts.values import Fact
from llama_index_memory_tiers.blocks.foreign import ForeignBlock
from llama_index_memory_tiers.blocks.heat import AgentStatement, HeatMemoryBlock, ProfileVersion
from llama_index_memory_tiers.blocks.journal.block import JournalMemoryBlock
from llama_index_memory_tiers.blocks.static import StaticMemoryBlock
from llama_index_memory_tiers.blocks.summary import SummaryMemoryBlock
from llama_index_memory_tiers.blocks.vector.block import VectorMemoryBlock
from llama_index_memory_tiers.blocks.working import WorkingMemoryBlock

__all__ = [
    "AgentStatement",
    "Episode",
    "EpisodeStep",
    "EpisodicMemoryBlock",
    "Fact",
    "FactExtractionMemoryBlock",
    "FactProposal",
    "HeatMemoryBlock",
    "JournalMemoryBlock",
    "ProfileVersion",
    "Query",
    "StaticMemoryBlock",
    "SummaryMemoryBlock",
    "TieredMemoryBlock",
    "ToolUse",
    "VectorMemoryBlock",
    "WorkingMemoryBlock",
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
