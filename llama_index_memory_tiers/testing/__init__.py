"""Models without keys or network, for tests, demos and documentation; `testing.contracts` holds the contract suites."""

from llama_index_memory_tiers.testing.embeddings import WordLlamaEmbedding
from llama_index_memory_tiers.testing.models import (
    DEFAULT_TOOL_RULES,
    HashEmbedding,
    QuotingLLM,
    ScriptedFunctionCallingLLM,
    ScriptedLLM,
    ToolCall,
    ToolRule,
)

__all__ = [
    "DEFAULT_TOOL_RULES",
    "HashEmbedding",
    "QuotingLLM",
    "ScriptedFunctionCallingLLM",
    "ScriptedLLM",
    "ToolCall",
    "ToolRule",
    "WordLlamaEmbedding",
]
