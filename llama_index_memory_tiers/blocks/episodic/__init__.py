"""EpisodicMemoryBlock: attempts at tasks, and what they taught."""

from llama_index_memory_tiers.blocks.episodic.block import EpisodicMemoryBlock
from llama_index_memory_tiers.blocks.episodic.episodes import Episode, EpisodeStep, ToolUse

__all__ = ["Episode", "EpisodeStep", "EpisodicMemoryBlock", "ToolUse"]
