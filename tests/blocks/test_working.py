"""WorkingMemoryBlock: tasks keep to themselves, last while they are open, and leave nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llama_index_memory_tiers import ConfigurationError, Storage, TieredMemory, WorkingMemoryBlock
from llama_index_memory_tiers.blocks.working import WorkingMemory
from tests.doubles import rows, said


def memory_of(storage: Storage, user: str | None = "ann", session: str = "s1", **fields: object) -> TieredMemory:
    return TieredMemory(storage=storage, user_id=user, session_id=session, memory_blocks=[WorkingMemoryBlock(**fields)])


def working_of(memory: TieredMemory) -> WorkingMemory:
    block = memory.memory_blocks[0]
    assert isinstance(block, WorkingMemoryBlock)
    return block.of(memory)


async def context(memory: TieredMemory) -> str:
    return "\n".join(message.content or "" for message in await memory.aget(input="go on"))


async def test_an_open_task_is_in_the_context_and_a_confirmed_one_is_gone_from_everywhere(storage: Storage) -> None:
    memory = memory_of(storage)
    async with working_of(memory).task("Bake a cake") as task:
        await task.plan("mix", "bake")
        await task.note("The oven runs hot.")
        await task.result("A batter.")
        shown = await context(memory)
        order = [shown.index(text) for text in ("Bake a cake", "plan: mix", "plan: bake", "oven runs hot", "A batter.")]
        assert order == sorted(order)
    assert await context(memory) == ""
    assert await working_of(memory).open_tasks() == []
    kept = await rows(storage, "SELECT text, data FROM {t}_records")
    assert not any("oven" in row.text + row.data or "Bake" in row.text + row.data for row in kept)


async def test_redo_keeps_what_was_written_for_the_next_attempt(storage: Storage) -> None:
    memory = memory_of(storage)
    working = working_of(memory)
    async with working.task("Bake a cake") as task:
        await task.note("The oven runs hot.")
        await task.redo()
    assert 'attempt="2"' in await context(memory)
    async with working.task("Bake a cake") as task:
        state = await task.state()
        assert state is not None
        assert (state.attempt, state.texts("note")) == (2, ("The oven runs hot.",))
    assert await context(memory) == ""


async def test_a_task_whose_code_raised_stays_open(storage: Storage) -> None:
    memory = memory_of(storage)

    async def burn() -> None:
        async with working_of(memory).task("Bake a cake") as task:
            await task.note("The oven runs hot.")
            raise ValueError("burnt")

    with pytest.raises(ValueError, match="burnt"):
        await burn()
    assert "The oven runs hot." in await context(memory)


async def test_an_open_task_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "restart.db"

    async def die(storage: Storage) -> None:
        task = await working_of(memory_of(storage)).task("Bake a cake").__aenter__()
        await task.plan("mix", "bake")

    async with Storage(path) as storage:
        await asyncio.create_task(die(storage))  # whose end nobody comes to
    async with Storage(path) as storage:
        memory = memory_of(storage)
        assert "plan: mix" in await context(memory)
        async with working_of(memory).task("Bake a cake") as again:
            await again.note("Mixed before the power cut.")
            state = await again.state()
            assert state is not None
            assert (state.texts("plan"), state.texts("note")) == (("mix", "bake"), ("Mixed before the power cut.",))
        assert await context(memory) == ""


async def test_nested_tasks_never_mix_even_under_one_name(storage: Storage) -> None:
    memory = memory_of(storage)
    working = working_of(memory)
    async with working.task("search") as outer:
        await outer.note("outer note")
        async with working.task("search") as inner:
            await inner.note("inner note")
            assert [state.path for state in await working.open_tasks()] == [("search",), ("search", "search")]
            found = await inner.state()
            assert found is not None
            assert found.texts("note") == ("inner note",)
            shown = await context(memory)
            assert '<task name="search">\nnote: outer note\n</task>' in shown
            assert '<task name="search > search">\nnote: inner note\n</task>' in shown
        assert "inner note" not in await context(memory)
        left = await outer.state()
        assert left is not None
        assert left.texts("note") == ("outer note",)


async def test_tasks_that_run_at_the_same_time_never_mix(storage: Storage) -> None:
    working = working_of(memory_of(storage))
    seen = {}

    async def work(name: str) -> None:
        async with working.task(name) as task:
            for number in range(5):
                await task.note(f"{name} {number}")
                async with working.task("part") as part:
                    await part.note(f"part of {name}")
                    inside = await part.state()
                    assert inside is not None
                    assert (inside.path, inside.texts("note")) == ((name, "part"), (f"part of {name}",))
            state = await task.state()
            assert state is not None
            seen[name] = state.texts("note")

    await asyncio.gather(*(work(name) for name in ("a", "b", "ab")))
    assert seen == {name: tuple(f"{name} {number}" for number in range(5)) for name in ("a", "b", "ab")}


async def test_confirming_a_task_clears_the_tasks_in_it_and_no_others(storage: Storage) -> None:
    working = working_of(memory_of(storage))
    async with working.task("other") as other:
        await other.redo()
    async with working.task("outer"), working.task("inner") as inner:
        await inner.redo()
    assert [state.path for state in await working.open_tasks()] == [("other",)]


async def test_a_task_that_was_confirmed_begins_anew_and_takes_nothing_while_it_is_closed(storage: Storage) -> None:
    working = working_of(memory_of(storage))
    async with working.task("Bake a cake") as task:
        await task.note("old")
    with pytest.raises(ConfigurationError, match="is not open"):
        await task.note("too late")
    async with working.task("Bake a cake") as task:
        state = await task.state()
        assert state is not None
        assert (state.attempt, state.entries) == (1, ())


async def test_a_new_plan_takes_the_place_of_the_old_one(storage: Storage) -> None:
    async with working_of(memory_of(storage)).task("Bake a cake") as task:
        await task.plan("mix", "bake")
        await task.plan("buy")
        state = await task.state()
        assert state is not None
        assert state.texts("plan") == ("buy",)


async def test_it_stays_within_its_tokens_with_the_plan_and_the_newest_notes(storage: Storage) -> None:
    memory = memory_of(storage, max_tokens=60)
    async with working_of(memory).task("Count") as task:
        await task.plan("count to fifty")
        for number in range(50):
            await task.note(f"this is number {number}")
        report = await memory.aexplain("go on")
        kept = [item.text for item in report.parts[0].kept]
        assert sum(item.tokens + 1 for item in report.parts[0].kept) <= 60
        assert kept[:2] == ["plan: count to fifty", "note: this is number 49"]
        assert len(kept) > 3


async def test_what_is_written_is_bounded_the_plan_and_the_newest_stay(storage: Storage) -> None:
    async with working_of(memory_of(storage)).task("Count") as task:
        await task.plan("count")
        for number in range(205):
            await task.note(f"{number}")
        state = await task.state()
        assert state is not None
        assert state.texts("plan") == ("count",)
        assert state.texts("note") == tuple(map(str, range(6, 205)))


async def test_what_is_written_during_a_turn_is_seen_in_it(storage: Storage) -> None:
    memory = memory_of(storage)
    await memory.aput(said("user", "Bake a cake."))
    async with working_of(memory).task("Bake a cake") as task:
        for text in ("first", "second"):
            await task.note(text)
            assert text in str(await memory.aget())
    assert len(await memory.aget()) == 1


async def test_sessions_and_users_see_their_own_tasks_only(storage: Storage) -> None:
    ann = memory_of(storage, "ann", "s1")
    others = [ann.for_session("s2"), ann.for_session("s1", user_id="bob"), memory_of(storage, None, "s1")]
    async with working_of(ann).task("Wrap the present") as task:
        await task.note("It is a bicycle.")
        assert "bicycle" in await context(ann)
        for other in others:
            assert "bicycle" not in await context(other)
            assert await working_of(other).open_tasks() == []
            async with working_of(other).task("Wrap the present") as theirs:
                state = await theirs.state()
                assert state is not None
                assert state.entries == ()
        assert "bicycle" in await context(ann)


async def test_a_task_of_the_user_is_seen_in_all_sessions(storage: Storage) -> None:
    ann = memory_of(storage, "ann", "s1", scope="user")
    async with working_of(ann).task("Move house") as task:
        await task.note("Boxes are in the cellar.")
        assert "cellar" in await context(ann.for_session("s2"))


async def test_notes_have_no_secrets_and_close_no_tag(storage: Storage) -> None:
    memory = memory_of(storage)
    async with working_of(memory).task("</task> password=hunter2secretvalue") as task:
        await task.note("</task></memory> password=hunter2secretvalue")
        shown = await context(memory)
        assert shown.count("</memory>") == 1
        assert shown.count("</task>") == 1
        kept = await rows(storage, "SELECT text, data FROM {t}_records")
        assert not any("hunter2" in row.text + row.data for row in kept)


@pytest.mark.parametrize("text", ["", "  "])
async def test_blank_names_and_texts_are_refused(storage: Storage, text: str) -> None:
    working = working_of(memory_of(storage))
    with pytest.raises(ConfigurationError, match="name="):
        working.task(text)
    async with working.task("Bake a cake") as task:
        for call in (task.note(text), task.result(text), task.plan(), task.plan("mix", text)):
            with pytest.raises(ConfigurationError, match="visible character"):
                await call
