"""One owner's records in memory: exact BM25 and dense search, kept up to date row by row."""

from llama_index_memory_tiers.storage.index.cache import IndexCache
from llama_index_memory_tiers.storage.index.rows import IndexColumns, IndexRow, encode_terms, encode_vector, term_number
from llama_index_memory_tiers.storage.index.search import MAX_QUERY_TERMS, Corpus, Hit, IndexQuery, OwnerIndex

__all__ = [
    "MAX_QUERY_TERMS",
    "Corpus",
    "Hit",
    "IndexCache",
    "IndexColumns",
    "IndexQuery",
    "IndexRow",
    "OwnerIndex",
    "encode_terms",
    "encode_vector",
    "term_number",
]
