"""VectorMemoryBlock: every message is recallable, by its words and by its meaning."""

from llama_index_memory_tiers.blocks.vector.block import VectorMemoryBlock

__all__ = ["VectorMemoryBlock"]
