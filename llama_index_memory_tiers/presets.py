"""Sets of arguments under one name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_index_memory_tiers.blocks import EpisodicMemoryBlock, SummaryMemoryBlock, VectorMemoryBlock
from llama_index_memory_tiers.budget import TokenBudget
from llama_index_memory_tiers.embeddings import embed_model_of_settings
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.extraction.models import llm_of_settings
from llama_index_memory_tiers.partitions import Partition, WritePolicy
from llama_index_memory_tiers.retention import ByAge

_SET = ("memory_blocks", "budget", "token_limit", "reserve_tokens", "retention")
_EPISODES = 2
_FORGET_DAYS = 90.0
_DECAY_RATE = 0.01


def survey() -> dict[str, Any]:
    """The numbers of the survey of agent memory, as it gives them.

    Returns:
        Arguments of `TieredMemory`: summaries of ten messages when `Settings.llm` is set, partitions with quotas and
        retention, its write policy and decay of .01 a day, two episodes, maintenance after 90 days, and its budget of
        8 000 tokens.
    """
    llm, embed_model = llm_of_settings(), embed_model_of_settings()
    quotas = sum(partition.top_k or 0 for partition in Partition.survey())
    blocks: list[Any] = [SummaryMemoryBlock(llm=llm)] if llm is not None else []
    blocks += [
        VectorMemoryBlock(
            embed_model=embed_model,
            partitions=Partition.survey(),
            write_policy=WritePolicy.survey(),
            decay_rate=_DECAY_RATE,
            similarity_top_k=quotas,
        ),
        EpisodicMemoryBlock(embed_model=embed_model, similar=_EPISODES, failures=0),
    ]
    names = [block.name for block in blocks]
    budget = TokenBudget.survey(summary=names[0] if llm is not None else None, vector=names[-2], episodes=names[-1])
    return {"memory_blocks": blocks, "budget": budget, "retention": (ByAge(days=_FORGET_DAYS),)}


def with_preset(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Put the arguments of a preset in place of its name.

    Args:
        fields: Arguments of `TieredMemory`.

    Returns:
        The same without `preset`, and with what it stands for.

    Raises:
        ConfigurationError: The name is unknown, or an argument that it sets was given as well.
    """
    left = {name: value for name, value in fields.items() if name != "preset"}
    preset = fields.get("preset")
    if preset is None:
        return left
    if preset != "survey":
        raise ConfigurationError(
            f"preset={preset!r:.100} was given.",
            allowed="preset is 'survey', or None.",
            remedy="Correct the name, or leave it out.",
        )
    both = [name for name in _SET if left.get(name)]
    if both:
        raise ConfigurationError(
            f"preset='survey' was given with {', '.join(both)}.",
            allowed=f"The preset sets {', '.join(_SET)} itself.",
            remedy="Leave one of them out.",
        )
    return {**left, **survey()}
