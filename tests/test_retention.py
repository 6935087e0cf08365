"""Each rule of retention lets go of its own and of nothing else; a maintenance does what its dry run says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from threading import get_ident
from typing import Any

import pytest
from doubles import Clock, rows, said, until
from heat_doubles import TOPICS, Analyst, block, memory, note, reader, talk, titles
from hypothesis import given
from hypothesis import strategies as st

from llama_index_memory_tiers import (
    ByAge,
    ByDisuse,
    ByHeat,
    ByImportance,
    ConfigurationError,
    NearDuplicates,
    Storage,
    TieredMemory,
    VectorMemoryBlock,
    maintenance,
)
from llama_index_memory_tiers.retention import (
    Holding,
    plan_by_age,
    plan_by_disuse,
    plan_by_heat,
    plan_by_importance,
    plan_near_duplicates,
    plan_retention,
)
from llama_index_memory_tiers.sameness import same_note

NOW = datetime(2026, 3, 2, 9, tzinfo=timezone.utc)
CAT, TRAIN, SOUP = TOPICS["cat"], TOPICS["train"], TOPICS["soup"]


def ago(days: float) -> datetime:
    return NOW - timedelta(days=days)


def holding(name: str, kind: str = "fact", days: float = 0, **more: Any) -> Holding:
    return Holding(name, "b", kind, ago(days), **{"text": name, **more})


def ids(departures: Sequence[Any]) -> list[str]:
    return [one.record_id for one in departures]


def test_by_age_what_was_said_too_long_ago_leaves() -> None:
    held = [holding("old", days=91), holding("edge", days=90), holding("pin", days=500, pinned=True), holding("new")]
    (gone,) = plan_by_age(ByAge(days=90), held, NOW)
    assert (gone.record_id, gone.policy, gone.reason) == ("old", "ByAge", "said 91.0 days ago")
    assert plan_by_age(ByAge(days=90, kinds=("segment",)), held, NOW) == []


def test_by_disuse_what_was_not_shown_for_long_leaves() -> None:
    held = [
        holding("never shown", "segment", days=40),
        holding("shown", "segment", days=40, used_at=ago(3)),
        holding("shown long ago", "segment", days=80, used_at=ago(31)),
        holding("a fact", days=400),
    ]
    assert ids(plan_by_disuse(ByDisuse(days=30), held, NOW)) == ["never shown", "shown long ago"]


def test_by_heat_what_has_cooled_down_leaves_but_no_newcomer() -> None:
    held = [
        holding("cold", "segment", days=3, heat=0.05),
        holding("warm", "segment", days=3, heat=2.0),
        holding("new", "segment", days=0.5, heat=0.0),
        holding("no heat", days=9),
    ]
    assert ids(plan_by_heat(ByHeat(below=0.1), held, NOW)) == ["cold"]


def test_by_importance_what_is_unimportant_and_old_at_once_leaves() -> None:
    held = [
        holding("trifle, old", days=100, importance=0.2),  # 80
        holding("trifle, new", days=10, importance=0.2),  # 8
        holding("vital, old", days=1000, importance=1.0),  # 0
    ]
    assert ids(plan_by_importance(ByImportance(stale_days=50), held, NOW)) == ["trifle, old"]


def test_of_two_that_say_the_same_the_older_is_replaced_by_the_newer() -> None:
    held = [
        holding("1", text="Ann has a cat called Tom.", days=3),
        holding("2", text="Ann has the cat called Tom!", days=1),
        holding("3", text="Ann has no cat called Tom.", days=0),
        holding("4", text="Ann has a cat called Tom.", side="agent/x"),
    ]
    (gone,) = plan_near_duplicates(NearDuplicates(), held, NOW)
    assert (gone.record_id, gone.successor) == ("1", "2")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Ann likes tea.", "ann likes the tea", True),
        ("Ann has lived in the old town of Rome since last summer", "Ann has lived in the old town of Rome since summer", True),
        ("Ann has 2 cats", "Ann has 3 cats", False),
        ("a b c d e f g h i j k not", "a b c d e f g h i j k", False),
        ("安喜欢咖啡。", "安喜欢咖啡", True),
        ("安不喜欢咖啡", "安喜欢咖啡", False),
        ("", "", False),  # texts without words say nothing
        ("…", "?!", False),
    ],
)  # fmt: skip
def test_notes_are_the_same_only_when_nothing_that_matters_differs(one: str, other: str, same: bool) -> None:
    assert same_note(one, other) is same
    assert same_note(other, one) is same


HOLDINGS = st.lists(
    st.builds(
        Holding,
        id=st.uuids().map(str), block=st.just("b"), kind=st.sampled_from(["fact", "segment", "page", "meter"]),
        said_at=st.floats(0, 400).map(ago), text=st.sampled_from(["a b", "a", "c d e"]),
        used_at=st.none() | st.floats(0, 400).map(ago), importance=st.floats(0, 1),
        heat=st.none() | st.floats(0, 9), pinned=st.booleans(),
    ),
    max_size=15,
)  # fmt: skip
RULES = (ByAge(days=200), ByDisuse(days=50), ByHeat(below=1), ByImportance(stale_days=60), NearDuplicates())


@given(HOLDINGS, st.permutations(RULES))
def test_a_plan_names_each_record_once_and_a_second_plan_finds_nothing(held: list[Holding], rules: Any) -> None:
    going = ids(plan_retention(rules, held, NOW))
    assert len(going) == len(set(going))
    leaving = {one.id: one for one in held if one.id in going}
    assert not any(one.pinned or one.kind in {"page", "meter"} for one in leaving.values())
    assert plan_retention(rules, [one for one in held if one.id not in leaving], NOW) == ()


@pytest.mark.parametrize(
    "bad",
    [
        lambda: ByAge(days=-1), lambda: ByAge(days=True), lambda: ByHeat(below=float("inf")),
        lambda: NearDuplicates(similarity=0), lambda: NearDuplicates(similarity=1.5), lambda: ByAge(kinds="fact"),
        lambda: TieredMemory(retention=["old"]), lambda: TieredMemory(retention=ByAge),
        lambda: TieredMemory(maintain_every=0), lambda: TieredMemory(maintain_every="daily"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigurationError):
        bad()


# --- maintenance ----------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def storage(tmp_path: Path, clock: Clock) -> AsyncIterator[Storage]:
    async with Storage(tmp_path / "memory.db", clock=clock) as opened:
        yield opened


async def everything(storage: Storage) -> list[Any]:
    return [tuple(row) for row in await rows(storage, "SELECT * FROM {t}_records ORDER BY id")]


async def test_a_dry_run_changes_nothing_and_the_real_one_does_what_it_said(storage: Storage, clock: Clock) -> None:
    chat = memory(storage, block(), retention=[ByDisuse(days=30), ByHeat(below=0.01)])
    await talk(chat, *CAT[:2])
    await chat.aflush()
    clock.pass_seconds(40 * 86400)
    await talk(chat, *TRAIN[:2])
    await chat.aflush()
    before = await everything(storage)
    planned = await chat.amaintain()
    assert [(one.policy, one.kind, one.block) for one in planned.departures] == [("ByDisuse", "segment", "HeatMemory")]
    assert "not used for 40.0 days" in str(planned)
    assert await everything(storage) == before
    done = await chat.amaintain(dry_run=False)
    assert (done.departures, done.dry_run) == (planned.departures, False)
    assert set(await titles(storage)) == {TRAIN[0][0]}
    after = await everything(storage)
    assert (await chat.amaintain(dry_run=False)).departures == ()
    assert await everything(storage) == after
    assert len(after) == len(before)  # put aside, not deleted


async def test_what_was_shown_lately_stays(storage: Storage, clock: Clock) -> None:
    chat = memory(storage, block(), retention=[ByDisuse(days=30)])
    await talk(chat, *CAT[:2], *TRAIN[:2])
    await chat.aflush()
    clock.pass_seconds(29 * 86400)
    asking = chat.for_session("t")
    await asking.aput(said("user", "What did the vet say about the cat Tom?"))
    await asking.aget()
    clock.pass_seconds(10 * 86400)
    await chat.amaintain(dry_run=False)
    assert set(await titles(storage)) == {CAT[0][0]}


async def test_duplicates_are_superseded_by_the_newer(storage: Storage, clock: Clock) -> None:
    llm = Analyst(knowledge=note("Ann has a cat."))
    chat = memory(storage, block(llm), retention=[NearDuplicates(similarity=0.5)])
    await talk(chat, *CAT)
    await chat.aflush()
    clock.pass_seconds(60)
    llm.rule("knowledge", note("Ann has a brown cat."))
    await talk(chat, *TRAIN)
    await chat.aflush()
    await chat.amaintain(dry_run=False)
    old, new = await reader(storage).history("fact")
    assert old.superseded_by == new.id
    assert new.live


@pytest.mark.parametrize("kinds", [None, ("message",)])
async def test_messages_whose_text_stands_in_the_log_are_no_duplicates(storage: Storage, kinds: Any) -> None:
    rules = [NearDuplicates(kinds=kinds)]
    block = VectorMemoryBlock(embed_model=None)
    chat = TieredMemory(storage=storage, user_id="ann", session_id="s", memory_blocks=[block], retention=rules)
    things = ("kettle", "ladder", "violin", "hammer", "teapot")
    for thing in things:
        await chat.aput(said("user", f"Where the {thing} stands."))
    await chat.aflush()
    assert (await chat.amaintain(dry_run=False)).departures == ()
    report = await chat.for_session("asking").aexplain(" ".join(things))
    told = [item.text for part in report.parts for item in part.kept]
    assert [sum(thing in text for text in told) for thing in things] == [1] * len(things)


async def test_the_loop_is_free_while_a_plan_is_made(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = memory(storage, block(), retention=[NearDuplicates(kinds=None)])
    await talk(chat, *CAT[:2])
    await chat.aflush()
    threads: list[int] = []

    def plan(*given: Any) -> Any:
        threads.append(get_ident())
        return plan_retention(*given)

    monkeypatch.setattr(maintenance, "plan_retention", plan)
    await chat.amaintain()
    assert threads
    assert get_ident() not in threads


async def test_a_maintenance_reaches_its_owner_only(storage: Storage, clock: Clock) -> None:
    blocks = block()
    ann, bob = memory(storage, blocks, retention=[ByAge(days=1)]), memory(storage, blocks, user="bob")
    for chat in (ann, bob):
        await talk(chat, *CAT[:2])
        await chat.aflush()
    clock.pass_seconds(5 * 86400)
    await ann.amaintain(dry_run=False)
    assert await titles(storage, "ann") == {}
    assert await titles(storage, "bob") == {CAT[0][0]: 2}


async def test_without_rules_or_a_session_nothing_leaves(storage: Storage) -> None:
    assert (await memory(storage, block()).amaintain(dry_run=False)).departures == ()
    assert (await memory(storage, block(), user=None, retention=[ByAge()]).amaintain(dry_run=False)).departures == ()


async def test_from_time_to_time_it_runs_by_itself(storage: Storage, clock: Clock) -> None:
    chat = memory(storage, block(), retention=[ByAge(days=1)], maintain_every=3600)
    await talk(chat, *CAT[:2])
    await chat.aflush()
    clock.pass_seconds(2 * 86400)
    await talk(chat, TRAIN[0])

    async def gone() -> bool:
        return await titles(storage) == {}

    await until(gone, what="the old topic left")
    await chat.aclose()
