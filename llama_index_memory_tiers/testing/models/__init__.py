"""Language and embedding models that need neither key nor network."""

from llama_index_memory_tiers.testing.models.answering import ToolCall
from llama_index_memory_tiers.testing.models.asking import DEFAULT_TOOL_RULES, ToolRule
from llama_index_memory_tiers.testing.models.hashing import HashEmbedding
from llama_index_memory_tiers.testing.models.quoting import QuotingLLM
from llama_index_memory_tiers.testing.models.scripted import ScriptedFunctionCallingLLM, ScriptedLLM

__all__ = [
    "DEFAULT_TOOL_RULES",
    "HashEmbedding",
    "QuotingLLM",
    "ScriptedFunctionCallingLLM",
    "ScriptedLLM",
    "ToolCall",
    "ToolRule",
]
