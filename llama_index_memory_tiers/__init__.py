"""Long-term, tiered memory for LlamaIndex agents: durable, scoped, inside its token budget."""

from llama_index_memory_tiers.blocks import StaticMemoryBlock, TieredMemoryBlock, VectorMemoryBlock
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.storage import Storage
from llama_index_memory_tiers.storage.chat_store import TieredChatStore

__version__ = "0.1.0"

__all__ = ["StaticMemoryBlock", "Storage", "TieredChatStore", "TieredMemory", "TieredMemoryBlock", "VectorMemoryBlock"]
