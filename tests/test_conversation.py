"""One turn by hand, with the names of MemoryOS's quick start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from llama_index.core import Settings
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.llms import MockLLM

from llama_index_memory_tiers import ConfigurationError, HeatMemoryBlock, Storage, TieredMemory
from llama_index_memory_tiers.testing import ScriptedLLM


def quick(storage: Storage | str, llm: ScriptedLLM | None) -> TieredMemory:
    return TieredMemory.from_defaults(
        user_id="user123", storage=storage, memory_blocks=[HeatMemoryBlock(llm=llm, embed_model=None)]
    )


def latte(messages: Sequence[ChatMessage]) -> str:
    told = "\n".join(message.content or "" for message in messages)
    return "试试燕麦拿铁。" if "拿铁" in told and "根据用户的喜好推荐咖啡" in told else "美式咖啡？"


def test_the_latte_example_runs_as_it_is_written(tmp_path: Path) -> None:
    memo = quick(str(tmp_path / "memoryos_data.db"), ScriptedLLM(latte))
    memo.add_memory(user_message="我喜欢喝咖啡，特别是拿铁", assistant_message="好的，我记住了您喜欢拿铁咖啡。")
    response = memo.get_response(user_message="推荐一些咖啡给我", assistant_message_context="根据用户的喜好推荐咖啡")
    assert response == "试试燕麦拿铁。"
    assert [message.content for message in memo.get_all()][2:] == ["推荐一些咖啡给我", response]
    memo.close()


async def test_another_session_of_the_user_knows_too(storage: Storage) -> None:
    memo = quick(storage, ScriptedLLM(latte))
    await memo.aadd_memory("我喜欢喝咖啡，特别是拿铁", "好的，我记住了您喜欢拿铁咖啡。")
    later = TieredMemory.from_defaults(
        user_id="user123", storage=storage, memory_blocks=[HeatMemoryBlock(llm=None, embed_model=None)]
    )
    await memo.aclose()
    asked = ScriptedLLM(latte)
    assert await later.aget_response("推荐一些咖啡给我", "根据用户的喜好推荐咖啡", llm=asked) == "试试燕麦拿铁。"
    roles = [message.role for message in asked.calls[0]]
    assert roles == [MessageRole.SYSTEM, MessageRole.USER]
    await later.aclose()


async def test_a_model_that_fails_leaves_nothing_behind(storage: Storage) -> None:
    memo = quick(storage, None)
    with pytest.raises(RuntimeError, match="no"):
        await memo.aget_response("hello", llm=ScriptedLLM([RuntimeError("no")]))
    assert await memo.aget_all() == []
    await memo.aclose()


async def test_the_answer_stays_within_the_limit_with_what_is_asked(storage: Storage) -> None:
    memo = TieredMemory(storage=storage, user_id="u", session_id="s", token_limit=200, token_flush_size=50)
    for number in range(30):
        await memo.aadd_memory(f"question number {number}", f"answer number {number}")
    llm = ScriptedLLM(["fine"])
    await memo.aget_response("and now?", "Be brief.", llm=llm)
    counter = memo._shared.counter
    assert sum(counter.message(message) for message in llm.calls[0]) <= 200
    await memo.aclose()


async def test_without_any_model_it_says_what_to_do(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    memo = quick(storage, None)
    with pytest.raises(ConfigurationError, match="llm="):
        await memo.aget_response("hello")
    monkeypatch.setattr(Settings, "_llm", MockLLM())
    assert await memo.aget_response("hello")
    await memo.aclose()


@pytest.mark.parametrize("pair", [(None, "a"), ("a", 3)])
async def test_what_is_no_text_is_refused(storage: Storage, pair: tuple[object, object]) -> None:
    memo = quick(storage, None)
    with pytest.raises(ConfigurationError, match="is text"):
        await memo.aadd_memory(*pair)  # type: ignore[arg-type]  # the point
    await memo.aclose()
