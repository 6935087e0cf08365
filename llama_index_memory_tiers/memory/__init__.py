"""TieredMemory: takes messages in, keeps the window small, hands contexts out."""

from llama_index_memory_tiers.memory.sessions import HANDLE_VERSION
from llama_index_memory_tiers.memory.tiered import TieredMemory

__all__ = ["HANDLE_VERSION", "TieredMemory"]
