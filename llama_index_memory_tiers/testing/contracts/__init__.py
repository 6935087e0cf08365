"""Contract suites: what every chat store and every memory block promises, as tests to run on your own."""

from llama_index_memory_tiers.testing.contracts.blocks import BLOCK_CAPABILITIES, BlockContract
from llama_index_memory_tiers.testing.contracts.stores import STORE_CAPABILITIES, StoreContract

__all__ = ["BLOCK_CAPABILITIES", "STORE_CAPABILITIES", "BlockContract", "StoreContract"]
