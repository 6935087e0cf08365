"""Measure on your own chats how much of the evidence for a question stands in a memory's context."""

from llama_index_memory_tiers.evaluation.checks import MakeMemory
from llama_index_memory_tiers.evaluation.holding import as_shown, context_text, holds
from llama_index_memory_tiers.evaluation.report import RecallOutcome, RecallReport
from llama_index_memory_tiers.evaluation.running import evaluate_recall

__all__ = ["MakeMemory", "RecallOutcome", "RecallReport", "as_shown", "context_text", "evaluate_recall", "holds"]
