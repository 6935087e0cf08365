"""Long-term, tiered memory for LlamaIndex agents: durable, scoped, inside its token budget."""

from llama_index_memory_tiers.blocks import (
    FactExtractionMemoryBlock,
    HeatMemoryBlock,
    ProfileVersion,
    StaticMemoryBlock,
    TieredMemoryBlock,
    VectorMemoryBlock,
)
from llama_index_memory_tiers.budget import TokenBudget
from llama_index_memory_tiers.chats import Chat, ChatTurn, RecallQuestion, read_chat_file
from llama_index_memory_tiers.errors import (
    BudgetError,
    ConfigurationError,
    InvalidMessageError,
    MemoryTiersError,
    StorageError,
)
from llama_index_memory_tiers.evaluation import RecallOutcome, RecallReport, evaluate_recall
from llama_index_memory_tiers.events import ContextReport, FlushReport, MaintenanceReport, TiersReport
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.memoryos import Takeover, import_memoryos
from llama_index_memory_tiers.records import StoredMessage
from llama_index_memory_tiers.redaction import Redactor
from llama_index_memory_tiers.retention import ByAge, ByDisuse, ByHeat, ByImportance, NearDuplicates
from llama_index_memory_tiers.storage import Storage
from llama_index_memory_tiers.storage.chat_store import TieredChatStore

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "ByAge",
    "ByDisuse",
    "ByHeat",
    "ByImportance",
    "Chat",
    "ChatTurn",
    "ConfigurationError",
    "ContextReport",
    "FactExtractionMemoryBlock",
    "FlushReport",
    "HeatMemoryBlock",
    "InvalidMessageError",
    "MaintenanceReport",
    "MemoryTiersError",
    "NearDuplicates",
    "ProfileVersion",
    "RecallOutcome",
    "RecallQuestion",
    "RecallReport",
    "Redactor",
    "StaticMemoryBlock",
    "Storage",
    "StorageError",
    "StoredMessage",
    "Takeover",
    "TieredChatStore",
    "TieredMemory",
    "TieredMemoryBlock",
    "TiersReport",
    "TokenBudget",
    "VectorMemoryBlock",
    "evaluate_recall",
    "import_memoryos",
    "read_chat_file",
]
