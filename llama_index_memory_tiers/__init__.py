"""Long-term, tiered memory for LlamaIndex agents: durable, scoped, inside its token budget."""

from llama_index_memory_tiers.attribution import attributed
from llama_index_memory_tiers.blocks import (
    AgentStatement,
    Episode,
    EpisodeStep,
    EpisodicMemoryBlock,
    Fact,
    FactExtractionMemoryBlock,
    FactProposal,
    HeatMemoryBlock,
    JournalMemoryBlock,
    ProfileVersion,
    StaticMemoryBlock,
    SummaryMemoryBlock,
    TieredMemoryBlock,
    ToolUse,
    VectorMemoryBlock,
    WorkingMemoryBlock,
)
from llama_index_memory_tiers.board import MessageBoard
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
from llama_index_memory_tiers.events import ContextReport, FlushReport, ForgetReceipt, MaintenanceReport, TiersReport
from llama_index_memory_tiers.memory import TieredMemory
from llama_index_memory_tiers.memoryos import Takeover, import_memoryos
from llama_index_memory_tiers.partitions import Partition, WritePolicy
from llama_index_memory_tiers.provenance import Provenance
from llama_index_memory_tiers.records import Recollection, StoredMessage
from llama_index_memory_tiers.redaction import Redactor
from llama_index_memory_tiers.retention import ByAge, ByDisuse, ByHeat, ByImportance, NearDuplicates
from llama_index_memory_tiers.storage import Storage
from llama_index_memory_tiers.storage.chat_store import TieredChatStore
from llama_index_memory_tiers.storage.selection import ForgetFilter
from llama_index_memory_tiers.storage.transfer import TransferReport
from llama_index_memory_tiers.views import MemoryView

__version__ = "0.1.0"

__all__ = [
    "AgentStatement",
    "BudgetError",
    "ByAge",
    "ByDisuse",
    "ByHeat",
    "ByImportance",
    "Chat",
    "ChatTurn",
    "ConfigurationError",
    "ContextReport",
    "Episode",
    "EpisodeStep",
    "EpisodicMemoryBlock",
    "Fact",
    "FactExtractionMemoryBlock",
    "FactProposal",
    "FlushReport",
    "ForgetFilter",
    "ForgetReceipt",
    "HeatMemoryBlock",
    "InvalidMessageError",
    "JournalMemoryBlock",
    "MaintenanceReport",
    "MemoryTiersError",
    "MemoryView",
    "MessageBoard",
    "NearDuplicates",
    "Partition",
    "ProfileVersion",
    "Provenance",
    "RecallOutcome",
    "RecallQuestion",
    "RecallReport",
    "Recollection",
    "Redactor",
    "StaticMemoryBlock",
    "Storage",
    "StorageError",
    "StoredMessage",
    "SummaryMemoryBlock",
    "Takeover",
    "TieredChatStore",
    "TieredMemory",
    "TieredMemoryBlock",
    "TiersReport",
    "TokenBudget",
    "ToolUse",
    "TransferReport",
    "VectorMemoryBlock",
    "WorkingMemoryBlock",
    "WritePolicy",
    "attributed",
    "evaluate_recall",
    "import_memoryos",
    "read_chat_file",
]
