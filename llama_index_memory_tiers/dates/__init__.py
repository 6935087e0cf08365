"""Times that texts name: read by rule, and worked out from when it was said; pure."""

from llama_index_memory_tiers.dates.reading import MAX_DATED_CHARS, MONTHS, DateHint, find_dates, number, read_dates
from llama_index_memory_tiers.dates.resolving import begins, ends, with_dates

__all__ = [
    "MAX_DATED_CHARS",
    "MONTHS",
    "DateHint",
    "begins",
    "ends",
    "find_dates",
    "number",
    "read_dates",
    "with_dates",
]
