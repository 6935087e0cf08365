"""A MemoryOS data folder is taken over: each page once, nothing torn, nothing twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from heat_doubles import block, memory, reader

from llama_index_memory_tiers import ConfigurationError, HeatMemoryBlock, Storage, TieredMemory, import_memoryos

SICK = {"user_input": "My cat Tom is sick.", "agent_response": "Call the vet.", "timestamp": "2025-07-01 10:00:00"}
FOOD = {"user_input": "What does he eat?", "agent_response": "Wet food.", "timestamp": "2025-07-01 10:05:00"}
NEW = {"user_input": "Thanks!", "agent_response": "You are welcome.", "timestamp": "2025-07-02 08:00:00"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "memoryos_data"
    write(root / "users/ann/short_term.json", [NEW])
    sessions = {"s1": {"summary": "cat", "details": [SICK, FOOD]}, "s2": {"summary": "food", "details": [FOOD]}}
    write(root / "users/ann/mid_term.json", {"sessions": sessions, "access_frequency": {}})
    long = {
        "user_profiles": {"ann": {"data": "Has a cat.", "last_updated": "2025-07-01 11:00:00"}},
        "knowledge_base": [
            {"knowledge": "Ann's cat is called Tom.", "timestamp": "2025-07-01 11:00:00"},
            {"knowledge": "None", "timestamp": "2025-07-01 11:00:00"},
        ],
        "assistant_knowledge": [],
    }
    write(root / "users/ann/long_term_user.json", long)
    learnt = {"assistant_knowledge": [{"knowledge": "Recommended a vet.", "timestamp": "2025-07-01 11:00:00"}]}
    write(root / "assistants/default_assistant_profile/long_term_assistant.json", learnt)
    return root


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), "utf-8")


async def test_everything_comes_over_once_with_its_time(storage: Storage, folder: Path) -> None:
    kept = block()
    chat = memory(storage, kept)
    taken = await import_memoryos(chat, folder)
    assert (taken.pages, taken.knowledge, taken.profile) == (3, 2, True)
    again = await import_memoryos(chat, folder)
    assert (again.pages, again.knowledge, again.profile) == (3, 0, False)
    stored = await chat.amessages()
    assert [one.text for one in stored] == [
        raw[key] for raw in (SICK, FOOD, NEW) for key in ("user_input", "agent_response")
    ]
    assert f"{stored[0].created_at:%Y-%m-%d %H:%M}" == "2025-07-01 10:00"
    await chat.aflush()
    assert len(await reader(storage).light("page")) == 3
    shown = str((await chat.for_session("t").aget(input="Is the cat sick?"))[0].content)
    assert "<profile>Has a cat.</profile>" in shown
    assert "Call the vet." in shown
    assert "<fact about='assistant'>Recommended a vet.</fact>" in shown


async def test_a_torn_file_is_refused_before_anything_is_stored(storage: Storage, folder: Path) -> None:
    (folder / "users/ann/long_term_user.json").write_text('{"knowledge_base": [', "utf-8")
    chat = memory(storage, block())
    with pytest.raises(ConfigurationError, match=r"long_term_user\.json"):
        await import_memoryos(chat, folder)
    assert await chat.aget_all() == []


@pytest.mark.parametrize("user", ["bob", "../users/ann", "", "."])
async def test_a_user_who_is_not_there_is_refused_with_those_who_are(storage: Storage, folder: Path, user: str) -> None:
    chat = memory(storage, block(), user=None)
    with pytest.raises(ConfigurationError, match="ann"):
        await import_memoryos(chat, folder, user_id=user)


async def test_a_memory_without_the_block_is_refused(storage: Storage, folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="HeatMemoryBlock"):
        await import_memoryos(TieredMemory(storage=storage, user_id="ann"), folder)


async def test_secrets_in_the_old_files_are_taken_out(storage: Storage, folder: Path) -> None:
    kept: HeatMemoryBlock = block()
    chat = memory(storage, kept)
    await kept.aset_profile(chat, "Uses password=hunter2secret everywhere.")
    assert "hunter2secret" not in (await kept.aprofiles(chat))[0].text
