"""A context on its way out: the request, what blocks answer, what fits, and the report on it."""

from llama_index_memory_tiers.context.builder import ContextBuilder, Settings
from llama_index_memory_tiers.context.request import Request, make_request

__all__ = ["ContextBuilder", "Request", "Settings", "make_request"]
