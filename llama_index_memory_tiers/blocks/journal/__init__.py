"""JournalMemoryBlock: Markdown files that agents and people write."""

from llama_index_memory_tiers.blocks.journal.block import JournalMemoryBlock

__all__ = ["JournalMemoryBlock"]
