"""Token budget, pure: count tokens, plan a flush, pack a context."""

from llama_index_memory_tiers.budget.counting import DOCUMENT_TOKENS, MEDIA_TOKENS, TokenCounter, Tokenizer
from llama_index_memory_tiers.budget.exchanges import Exchanges
from llama_index_memory_tiers.budget.flushing import (
    WindowRow,
    plan_flush,
    usual_flush,
    window_row,
)
from llama_index_memory_tiers.budget.items import (
    Item,
    LeftOut,
    Packed,
    PackedPart,
    Part,
    Reason,
    Row,
    section_text,
    tag_name,
)
from llama_index_memory_tiers.budget.packing import Packer, Render
from llama_index_memory_tiers.budget.shares import TokenBudget, widened
from llama_index_memory_tiers.budget.window_plan import WindowPlan

__all__ = [
    "DOCUMENT_TOKENS",
    "MEDIA_TOKENS",
    "Exchanges",
    "Item",
    "LeftOut",
    "Packed",
    "PackedPart",
    "Packer",
    "Part",
    "Reason",
    "Render",
    "Row",
    "TokenBudget",
    "TokenCounter",
    "Tokenizer",
    "WindowPlan",
    "WindowRow",
    "plan_flush",
    "section_text",
    "tag_name",
    "usual_flush",
    "widened",
    "window_row",
]
