"""FactExtractionMemoryBlock: facts, how they change, and what is known about them."""

from llama_index_memory_tiers.blocks.facts.block import FactExtractionMemoryBlock
from llama_index_memory_tiers.blocks.facts.proposals import FactProposal
from llama_index_memory_tiers.blocks.facts.values import Fact

__all__ = ["Fact", "FactExtractionMemoryBlock", "FactProposal"]
