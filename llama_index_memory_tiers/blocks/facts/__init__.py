"""FactExtractionMemoryBlock: facts, how they change, and what is known about them."""

from llama_index_memory_tiers.blocks.facts.block import FactExtractionMemoryBlock
from llama_index_memory_tiers.blocks.facts.desk import Fact
from llama_index_memory_tiers.blocks.facts.proposals import FactProposal

__all__ = ["Fact", "FactExtractionMemoryBlock", "FactProposal"]
