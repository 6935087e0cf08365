"""Presets: one name for a set of arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core.settings import Settings

from llama_index_memory_tiers import ByAge, ConfigurationError, TieredMemory, TokenBudget, VectorMemoryBlock
from llama_index_memory_tiers.testing import HashEmbedding, ScriptedLLM
from tests.doubles import said


@pytest.fixture
def models() -> Iterator[None]:
    before = Settings._llm, Settings._embed_model
    Settings._llm, Settings._embed_model = ScriptedLLM(lambda _: "They talked."), HashEmbedding()
    yield
    Settings._llm, Settings._embed_model = before


def names(memory: TieredMemory) -> list[str]:
    return [block.name for block in memory.memory_blocks]


@pytest.mark.parametrize("make", [TieredMemory, TieredMemory.from_defaults])
def test_the_surveys_numbers_are_set(make: Any, models: None) -> None:
    memory = make(session_id="s", preset="survey")
    assert names(memory) == ["Summary", "RetrievedMessages", "Episodes"]
    assert memory.budget == TokenBudget.survey()
    assert (memory.token_limit, memory.reserve_tokens) == (8000, 2000)
    vector = memory.memory_blocks[1]
    assert isinstance(vector, VectorMemoryBlock)
    assert [(p.name, p.top_k, p.retention_days) for p in vector.partitions] == [
        ("facts", 10, None), ("decisions", 5, 365), ("errors", 5, 180), ("conversations", 3, 30),
    ]  # fmt: skip
    assert vector.decay_rate == 0.01
    assert memory.retention == (ByAge(days=90),)
    memory.close()


async def test_without_models_it_works_without_summaries() -> None:
    async with TieredMemory(user_id="ann", preset="survey", delivery="inline") as memory:
        assert names(memory) == ["RetrievedMessages", "Episodes"]
        await memory.aput_messages([said("user", "We decided on the blue pump."), said("assistant", "Nice weather.")])
        shown = repr(await memory.for_session("other").aget("pump"))
        assert "blue pump" in shown
        assert "weather" not in shown  # its write policy keeps what matters


@pytest.mark.parametrize(
    "also", [{"budget": TokenBudget(100)}, {"token_limit": 5}, {"memory_blocks": [VectorMemoryBlock(embed_model=None)]}]
)
def test_what_it_sets_can_not_be_given_as_well(also: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(also))):
        TieredMemory(session_id="s", preset="survey", **also)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="memgpt"):
        TieredMemory(session_id="s", preset="memgpt")
