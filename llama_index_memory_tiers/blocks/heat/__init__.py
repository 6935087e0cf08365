"""HeatMemoryBlock: what a user keeps coming back to becomes knowledge about them."""

from llama_index_memory_tiers.blocks.heat.block import HeatMemoryBlock
from llama_index_memory_tiers.blocks.heat.hands import ProfileVersion
from llama_index_memory_tiers.blocks.heat.sharing import AgentStatement

__all__ = ["AgentStatement", "HeatMemoryBlock", "ProfileVersion"]
