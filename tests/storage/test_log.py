"""The message log: nothing lost, nothing doubled, in the order of the puts, at a flat cost."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_index.core.storage.chat_store.base_db import MessageStatus
from running import MakeStorage
from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers import Storage
from llama_index_memory_tiers.records import MessageMeta
from llama_index_memory_tiers.storage import Entry, codec
from llama_index_memory_tiers.storage import database as database_module
from llama_index_memory_tiers.storage.alignment import Alignment, LogRow, plan_alignment
from llama_index_memory_tiers.storage.rows import ACTIVE, ARCHIVED, GONE


def entry(words: str, *, tokens: int = 1, uid: str | None = None, role: str = "user", created_at: int = 1) -> Entry:
    data = f'{{"role":"{role}","additional_kwargs":{{}},"blocks":[{{"block_type":"text","text":"{words}"}}]}}'
    return Entry(uid or str(uuid.uuid4()), role, tokens, "words", created_at, data)


def entries(*words: str) -> list[Entry]:
    return [entry(one) for one in words]


async def put(storage: Storage, *words: str) -> None:
    await storage.log.append("ann", "s", entries(*words), now=storage.now())


async def window(storage: Storage) -> list[str | None]:
    return [stored.message.content for stored in (await storage.log.window("ann", "s")).messages]


async def history(storage: Storage, *statuses: str) -> list[str | None]:
    session = await storage.log.session("ann", "s")
    assert session is not None
    found, _ = await storage.log.read(session.sid, "s", statuses=statuses or None)
    return [stored.message.content for stored in found]


async def assert_exact(storage: Storage) -> None:
    """Head and totals of the session's row are what its messages say."""
    session = await storage.log.session("ann", "s")
    assert session is not None
    found, _ = await storage.log.read(session.sid, "s", tombstones=True)
    active = [stored.tokens for stored in (await storage.log.window("ann", "s")).messages]
    assert session.active_tokens == sum(active)
    assert [stored.seq for stored in found] == sorted({stored.seq for stored in found})
    assert session.head_seq == await storage.log.count(session.sid, (ACTIVE, ARCHIVED, GONE, "cleared"))


async def change(storage: Storage, seq: int, **values: Any) -> None:
    m = storage._tables.messages

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(update(m).where(m.c.seq == seq).values(**values))

    await storage._database.write(work)


# --- alignment: the decision ----------------------------------------------------------------------------------

NAMES = st.sampled_from("abc")
ROWS = st.lists(st.tuples(st.booleans(), NAMES, st.integers(0, 5)), max_size=12).map(
    lambda rows: [LogRow(seq, *row) for seq, row in enumerate(rows, 1)]
)
WANTED = st.lists(NAMES, max_size=8)
ROOM = st.none() | st.integers(0, 30)


def after(log: Sequence[LogRow], plan: Alignment) -> list[LogRow]:
    """The window when a plan has been carried out, before anything new is appended."""
    kept = [row for row in log if (row.active and row.seq not in plan.archive) or row.seq in plan.restore]
    return sorted(kept, key=lambda row: row.seq)


@given(ROWS, WANTED, ROOM)
def test_a_plan_moves_only_what_can_be_moved(log: list[LogRow], wanted: list[str], room: int | None) -> None:
    plan = plan_alignment(log, wanted, room_tokens=room)
    rows = {row.seq: row for row in log}
    assert all(rows[seq].active for seq in plan.archive)
    assert not any(rows[seq].active for seq in plan.restore)
    assert 0 <= plan.kept <= len(wanted)
    assert list(plan.restore) == sorted(set(plan.restore))


@given(ROWS, WANTED, ROOM)
def test_what_stays_is_a_part_of_what_is_wanted_in_order(
    log: list[LogRow], wanted: list[str], room: int | None
) -> None:
    plan = plan_alignment(log, wanted, room_tokens=room)
    left = iter(wanted[: plan.kept])
    assert all(row.hash in left for row in after(log, plan))


@given(ROWS, WANTED)
def test_without_a_bound_the_window_is_exactly_what_is_wanted(log: list[LogRow], wanted: list[str]) -> None:
    plan = plan_alignment(log, wanted, room_tokens=None)
    assert [row.hash for row in after(log, plan)] + wanted[plan.kept :] == wanted


@given(ROWS, st.lists(NAMES, max_size=3), ROOM)
def test_a_window_that_is_sent_again_stays_where_it_is(log: list[LogRow], new: list[str], room: int | None) -> None:
    active = [row.hash or "" for row in log if row.active]
    room = None if room is None else max(room, 1)
    plan = plan_alignment(log, active + new, room_tokens=room)
    if plan.kept <= len(active):
        assert plan == Alignment(len(active), (), ())
    assert plan.archive == () or plan.kept > len(active)


@given(ROWS, ROOM)
def test_a_whole_history_that_is_sent_again_changes_nothing(log: list[LogRow], room: int | None) -> None:
    plan = plan_alignment(log, [row.hash or "" for row in log], room_tokens=room)
    assert plan.kept == len(log)
    assert plan.archive == ()
    if room is not None and any(row.active and row.tokens for row in log):
        assert plan.restore == ()


@given(ROWS, WANTED, st.integers(0, 30))
def test_the_archive_comes_back_newest_first_as_far_as_there_is_room(
    log: list[LogRow], wanted: list[str], room: int
) -> None:
    plan = plan_alignment(log, wanted, room_tokens=room)
    window = after(log, plan)
    if plan.restore:
        assert sum(row.tokens for row in window) <= room


def test_an_archived_twin_does_not_displace_what_the_window_shows() -> None:
    log = [LogRow(1, False, "hi", 1), LogRow(2, False, "x", 1), LogRow(3, True, "hi", 1), LogRow(4, True, "y", 1)]
    assert plan_alignment(log, ["hi", "y", "new"], room_tokens=0) == Alignment(2, (), ())


# --- alignment: the deed --------------------------------------------------------------------------------------


async def test_a_resent_history_stores_only_what_is_new(storage: Storage) -> None:
    said = ["u1", "a1", "u2", "a2", "u3"]
    for length in range(1, 6):
        result = await storage.log.align("ann", "s", entries(*said[:length]), now=1, room_tokens=100)
        assert result.stored == 1
    assert await history(storage) == said
    await assert_exact(storage)


async def test_aligning_archives_what_is_dropped_and_loses_nothing(storage: Storage) -> None:
    await put(storage, "u1", "a1", "u2", "a2")
    await storage.log.align("ann", "s", entries("u1", "a1", "other"), now=1, room_tokens=100)
    assert await window(storage) == ["u1", "a1", "other"]
    assert await history(storage, ARCHIVED) == ["u2", "a2"]
    await storage.log.align("ann", "s", [], now=1, room_tokens=100)
    assert await window(storage) == []
    assert len(await history(storage)) == 5
    await assert_exact(storage)


async def test_aligning_brings_the_archive_back_as_far_as_there_is_room(storage: Storage) -> None:
    await put(storage, "u1", "a1", "u2", "a2")
    await storage.log.archive("ann", "s", [1, 2, 3, 4])
    await storage.log.align("ann", "s", entries("u1", "a1", "u2", "a2"), now=1, room_tokens=3)
    assert await window(storage) == ["a1", "u2", "a2"]
    await assert_exact(storage)


async def test_aligning_a_long_window_leaves_none_of_it(make_storage: MakeStorage) -> None:
    storage = make_storage("private")
    await put(storage, *(str(number) for number in range(2500)))
    await storage.log.align("ann", "s", entries("new"), now=1, room_tokens=100)
    assert await window(storage) == ["new"]
    await assert_exact(storage)


# --- appending ------------------------------------------------------------------------------------------------


async def test_a_repeated_put_is_one_put(storage: Storage) -> None:
    batch = entries("a", "b", "c")
    first = await storage.log.append("ann", "s", batch, now=1)
    again = await storage.log.append("ann", "s", batch, now=2)
    assert (first.stored, again.stored) == (3, 0)
    assert (again.head_seq, again.active_tokens) == (first.head_seq, first.active_tokens) == (3, 3)
    assert await window(storage) == ["a", "b", "c"]
    await assert_exact(storage)


async def test_a_batch_that_is_partly_known_stores_the_rest_in_order(storage: Storage) -> None:
    a, b, c, d = entries("a", "b", "c", "d")
    await storage.log.append("ann", "s", [b], now=1)
    result = await storage.log.append("ann", "s", [a, b, c, c, d], now=2)
    assert result.stored == 3
    assert await window(storage) == ["b", "a", "c", "d"]
    await assert_exact(storage)


async def test_the_same_put_by_many_at_once_is_one_put(make_storage: MakeStorage, storage_kind: str) -> None:
    storages = [make_storage(storage_kind) for _ in range(3)]
    await storages[0].aopen()
    batch = entries("a", "b")
    results = await asyncio.gather(
        *(storages[n % 3].log.append("ann", "s", batch, now=1) for n in range(12)),
        *(storages[n % 3].log.append("ann", "s", entries(f"c{n}"), now=1) for n in range(6)),
    )
    assert sum(result.stored for result in results) == 8
    assert sorted(await window(storages[1]), key=str) == ["a", "b", *(f"c{n}" for n in range(6))]
    await assert_exact(storages[2])


@pytest.mark.parametrize("lost_replies", [1, 3])
async def test_a_lost_reply_to_a_commit_doubles_nothing(
    storage: Storage, lost_replies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "LONGEST_PAUSE_SECONDS", 0.001)
    await put(storage, "before")
    real = storage._database._writing
    left = lost_replies

    async def writing(work: Any) -> Any:
        nonlocal left
        result = await real(work)  # it is committed …
        if left:
            left -= 1
            raise ConnectionResetError("the reply is lost")  # … and nobody knows
        return result

    monkeypatch.setattr(storage._database, "_writing", writing)
    result = await storage.log.append("ann", "s", [entry("a", tokens=5), entry("b", tokens=7)], now=1)
    assert (result.head_seq, result.active_tokens) == (3, 13)
    assert await window(storage) == ["before", "a", "b"]
    await assert_exact(storage)


async def test_a_uid_belongs_to_its_session(storage: Storage) -> None:
    batch = [entry("a", uid="same")]
    for user_id, session_id in (("ann", "s"), ("ann", "t"), ("bob", "s"), ("", "s")):
        assert (await storage.log.append(user_id, session_id, batch, now=1)).stored == 1


async def test_order_is_that_of_the_puts_when_the_clock_goes_backwards(
    make_storage: MakeStorage, storage_kind: str
) -> None:
    times = iter(datetime(2026, 1, 1, tzinfo=timezone.utc) - timedelta(hours=n) for n in range(100))
    storage = make_storage(storage_kind, clock=lambda: next(times))
    for word in ("a", "b", "c"):
        now = storage.now()
        await storage.log.append("ann", "s", [entry(word, created_at=now)], now=now)
    assert await window(storage) == ["a", "b", "c"]
    assert [stored.message.content for stored in await storage.log.move_oldest("ann", "s", 1)] == ["a"]


async def test_the_cost_of_a_put_does_not_grow_with_the_window(storage: Storage) -> None:
    costs = []
    for size in (10, 1990):
        await storage.log.append("ann", "s", entries(*(f"m{n}" for n in range(size))), now=1)
        before = storage.statements
        await put(storage, "one more")
        costs.append(storage.statements - before)
    # BEGIN IMMEDIATE, the session's row, the message, COMMIT; on PostgreSQL the driver sends the first and last.
    assert costs[0] == costs[1] == (4 if storage._database.sqlite else 2)


async def test_the_cost_of_a_batch_is_that_of_one_message(storage: Storage) -> None:
    await put(storage, "first")
    costs = []
    for size in (1, 300):
        before = storage.statements
        await put(storage, *(f"m{n}" for n in range(size)))
        costs.append(storage.statements - before)
    assert costs[0] == costs[1]


async def test_reading_the_window_again_is_one_statement(storage: Storage) -> None:
    await put(storage, *(f"m{n}" for n in range(50)))
    await storage.log.window("ann", "s")
    before = storage.statements
    first = await storage.log.window("ann", "s")
    assert storage.statements - before == 1
    assert await storage.log.window("ann", "s") is first


async def test_consumers_are_born_with_the_session(storage: Storage) -> None:
    await storage.log.append("ann", "s", entries("a"), now=1, consumers=["facts", "vectors"])
    result = await storage.log.append("ann", "s", entries("b"), now=1, consumers=["late"])
    cursors = await storage.cursors.all(result.sid)
    assert {key: cursor.pos for key, cursor in cursors.items()} == {"facts": 0, "vectors": 0}


# --- moving out of the window ---------------------------------------------------------------------------------


async def test_archiving_moves_each_message_once(storage: Storage) -> None:
    await put(storage, "a", "b", "c")
    assert await storage.log.archive("ann", "s", [1, 2, 99]) == 2
    assert await storage.log.archive("ann", "s", [2, 3]) == 1
    assert await window(storage) == []
    assert await history(storage) == ["a", "b", "c"]
    await assert_exact(storage)


async def test_two_flushes_at_once_archive_each_message_once(make_storage: MakeStorage, storage_kind: str) -> None:
    storages = [make_storage(storage_kind) for _ in range(2)]
    await put(storages[0], *(f"m{n}" for n in range(20)))
    moved = await asyncio.gather(*(storages[n % 2].log.archive("ann", "s", range(1, 11)) for n in range(6)))
    taken = await asyncio.gather(*(storages[n % 2].log.move_oldest("ann", "s", 3) for n in range(4)))
    assert sum(moved) == 10
    assert sorted(stored.seq for part in taken for stored in part) == list(range(11, 21))
    await assert_exact(storages[0])


async def test_a_window_sees_what_another_process_did_to_it(make_storage: MakeStorage, storage_kind: str) -> None:
    here, there = make_storage(storage_kind), make_storage(storage_kind)
    await put(here, "a", "b", "c")
    assert await window(here) == await window(there) == ["a", "b", "c"]
    await put(there, "d")
    assert await window(here) == ["a", "b", "c", "d"]
    await there.log.archive("ann", "s", [1, 2])
    assert await window(here) == ["c", "d"]
    await there.log.align("ann", "s", entries("a", "d"), now=1, room_tokens=100)
    assert await window(here) == await window(there)
    await there.log.clear("ann", "s", (ACTIVE, ARCHIVED))
    assert await window(here) == []
    await put(there, "e")
    assert await window(here) == ["e"]


async def test_a_cleared_message_leaves_the_history_but_stays_a_source(storage: Storage) -> None:
    await put(storage, "a", "b")
    await storage.log.archive("ann", "s", [1])
    assert await storage.log.clear("ann", "s", (ACTIVE, ARCHIVED)) == 2
    assert await history(storage, ACTIVE, ARCHIVED) == []
    assert await history(storage) == ["a", "b"]
    await assert_exact(storage)


async def test_a_forgotten_message_leaves_no_text_and_a_late_retry_brings_none_back(storage: Storage) -> None:
    batch = [entry("a"), entry("secret words"), entry("c")]
    await storage.log.append("ann", "s", batch, now=1)
    assert await storage.log.archive("ann", "s", [2], status=GONE) == 1
    m = storage._tables.messages

    async def work(connection: AsyncConnection) -> Any:
        return (await connection.execute(select(m.c.data, m.c.meta, m.c.hash).where(m.c.seq == 2))).one()

    assert tuple(await storage._database.read(work)) == (None, None, None)
    assert (await storage.log.append("ann", "s", batch, now=2)).stored == 0
    assert await window(storage) == await history(storage) == ["a", "c"]
    session = await storage.log.session("ann", "s")
    assert session is not None
    assert await storage.log.read(session.sid, "s", after=1, until=2, tombstones=True) == ([], 2)
    assert await storage.log.read(session.sid, "s", after=1, until=2) == ([], 0)
    await assert_exact(storage)


async def test_deleting_the_oldest_leaves_tombstones(storage: Storage) -> None:
    await put(storage, "a", "b", "c")
    assert [stored.message.content for stored in await storage.log.move_oldest("ann", "s", 2, status=GONE)] == [
        "a",
        "b",
    ]
    assert await history(storage) == ["c"]
    assert await storage.log.move_oldest("ann", "s", 0) == []
    assert await storage.log.move_oldest("nobody", "s", 5) == []
    await assert_exact(storage)


async def _deletes(storage: Storage, user: str) -> None:
    await storage.log.archive(user, "s", [1], status=GONE)
    await storage.log.move_oldest(user, "s", 1, status=GONE)
    await storage.log.clear(user, "s", (ACTIVE, ARCHIVED), gone=True)


async def _puts_away(storage: Storage, user: str) -> None:
    await storage.log.archive(user, "s", [1])
    await storage.log.move_oldest(user, "s", 1)
    await storage.log.clear(user, "s", (ACTIVE, ARCHIVED))
    await storage.log.archive(user, "s", [1], status=GONE)  # nothing that is there


@pytest.mark.parametrize(
    ("work", "user", "epochs"),
    [
        (_deletes, "ann", {"u:ann": 3, "s:1": 3}),
        (_deletes, "", {"s:1": 3}),
        (_puts_away, "ann", {}),
    ],
)
async def test_each_deletion_voids_what_is_known_of_its_owners_and_nothing_else_does(
    storage: Storage, work: Callable[[Storage, str], Awaitable[None]], user: str, epochs: dict[str, int]
) -> None:
    for session in ("s", "other"):
        await storage.log.append(user, session, entries("a", "b", "c"), now=storage.now())
    before = await storage.log.window(user, "other")
    await work(storage, user)
    found = {owner: await storage.records.epoch(owner) for owner in ("u:ann", "u:", "s:1", "s:2")}
    assert {owner: epoch for owner, epoch in found.items() if epoch} == epochs
    # The user's other sessions remember no recall of it.
    assert ((await storage.log.window(user, "other")).owner_rev > before.owner_rev) == ("u:ann" in epochs)


# --- reading --------------------------------------------------------------------------------------------------


async def test_ranges_and_pages_are_cut_as_asked(storage: Storage) -> None:
    await put(storage, *"abcdef")
    session = await storage.log.session("ann", "s")
    assert session is not None

    async def read(**how: Any) -> tuple[str, int]:
        found, last = await storage.log.read(session.sid, "s", **how)
        return "".join(stored.message.content or "" for stored in found), last

    assert await read() == ("abcdef", 6)
    assert await read(after=2, until=4) == ("cd", 4)
    assert await read(limit=2) == ("ab", 2)
    assert await read(limit=2, offset=1) == ("bc", 3)
    assert await read(limit=2, newest=True) == ("ef", 6)
    assert await read(until=3, limit=2, newest=True) == ("bc", 3)
    assert await read(after=6) == ("", 0)


async def test_an_offset_without_a_limit_skips_the_oldest(storage: Storage) -> None:
    await put(storage, *"abc")
    session = await storage.log.session("ann", "s")
    assert session is not None
    found, _ = await storage.log.read(session.sid, "s", offset=1)
    assert [stored.message.content for stored in found] == ["b", "c"]


DAMAGES: list[dict[str, Any]] = [
    *({"data": data} for data in ("{", "null", "[]", '{"role": "user"}', '{"role": "x", "blocks": "secret"}', None)),
    {"data": "[" * 5000},
    *(
        {"meta": meta}
        for meta in ("[]", "5", "{", "[" * 5000, '{"sent_from": 5}', '{"utc_offset_seconds": 1000000000}')
    ),
    {"created_at": 2**62},
    {"tokens": -1},
]
ONLY_SQLITE_HOLDS: list[dict[str, Any]] = [
    {"data": b"\xff"},
    {"tokens": "many"},
    {"tokens": 1.5},
    {"created_at": "yesterday"},
    {"created_at": float("inf")},
]


@pytest.mark.parametrize("damage", [*DAMAGES, *ONLY_SQLITE_HOLDS], ids=lambda damage: f"{damage!r:.40}")
async def test_a_damaged_row_is_skipped_and_reported_and_the_session_goes_on(
    storage: Storage, damage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    if damage in ONLY_SQLITE_HOLDS and not storage._database.sqlite:
        pytest.skip("PostgreSQL holds in a column what it was made for")
    await put(storage, "a", "secret words", "c")
    await change(storage, 2, **damage)
    with caplog.at_level(logging.ERROR):
        found = await storage.log.window("ann", "s")
    assert [stored.message.content for stored in found.messages] == ["a", "c"]
    assert found.damaged == (2,)
    assert [(record.message, record.__dict__["seq"]) for record in caplog.records] == [("damaged message skipped", 2)]
    assert "secret" not in caplog.text
    await put(storage, "d")
    assert await window(storage) == ["a", "c", "d"]
    assert (await storage.log.window("ann", "s")).damaged == (2,)
    assert [stored.seq for stored in await storage.log.move_oldest("ann", "s", 2)] == [1]
    assert await window(storage) == ["c", "d"]


@pytest.mark.parametrize("rev", [1.5, 2**63 - 1, "many"])
async def test_a_damaged_revision_of_the_owner_closes_no_window(rev: object) -> None:
    async with Storage() as storage:
        await put(storage, "a")
        owners = storage._tables.owners

        async def damage(connection: AsyncConnection) -> None:
            for owner in ("u:ann", "s:1"):
                await connection.execute(insert(owners).values(owner=owner, rev=rev, epoch=0))

        await storage._database.write(damage)
        assert await window(storage) == ["a"]
        await put(storage, "b")
        assert await window(storage) == ["a", "b"]


async def test_flushed_until_is_the_last_that_left_the_window_for_good(storage: Storage) -> None:
    system = entry("rules", role="system")
    await storage.log.append("ann", "s", [system, *entries("a", "b", "c")], now=1)
    session = await storage.log.session("ann", "s")
    assert session is not None
    assert await storage.log.flushed_until(session.sid) == 1
    await storage.log.archive("ann", "s", [2, 3])
    assert await storage.log.flushed_until(session.sid) == 3
    await storage.log.archive("ann", "s", [4])
    assert await storage.log.flushed_until(session.sid) == 4


async def test_a_session_is_behind_by_what_left_its_own_window_whatever_stands_in_others(storage: Storage) -> None:
    for user, words in (("ann", "abcd"), ("bob", "efg")):  # of which bob's all stand in his window
        await storage.log.append(user, "s", entries(*words), now=1, consumers=["block"])

    async def behind(asking: str | None) -> list[str]:
        return [found.user_id for found in await storage.log.behind("ann", ["block"], asking=asking)]

    assert await behind(None) == ["ann"]
    assert await behind("s") == []  # all that it said stands in its window
    await storage.log.archive("ann", "s", [1, 2, 3])
    assert await behind("s") == ["ann"]
    await storage.log.append("ann", "other", entries("x"), now=2, consumers=["block"])
    assert await behind("s") == ["ann", "ann"]


async def test_a_recount_renews_counts_and_total(storage: Storage) -> None:
    await put(storage, "a", "b", "c")
    await storage.log.archive("ann", "s", [1])
    result = await storage.log.append("ann", "s", [], now=1)
    await storage.log.recount(result.sid, {2: 20, 3: 30}, "other")
    found = await storage.log.window("ann", "s")
    assert [stored.tokens for stored in found.messages] == [20, 30]
    assert set(found.counters) == {"other"}
    await assert_exact(storage)


async def test_sessions_of_look_alike_users_are_apart(storage: Storage) -> None:
    for user_id in ("ann", "Ann", "ann ", "a%", "a_n", ""):
        await storage.log.append(user_id, "s", entries(f"of {user_id}"), now=1)
    for user_id in ("ann", "Ann", "ann ", "a%", "a_n", ""):
        sessions = await storage.log.sessions(user_id)
        assert [session.user_id for session in sessions] == [user_id]
        found = (await storage.log.window(user_id, "s")).messages
        assert [stored.message.content for stored in found] == [f"of {user_id}"]


async def test_statuses_and_ids_are_readable(storage: Storage) -> None:
    given = [entry("a", uid="my-own-id"), entry("b")]
    await storage.log.append("ann", "s", given, now=1)
    await storage.log.archive("ann", "s", [1])
    session = await storage.log.session("ann", "s")
    assert session is not None
    found, _ = await storage.log.read(session.sid, "s")
    assert [(stored.id, stored.status) for stored in found] == [
        ("my-own-id", MessageStatus.ARCHIVED),
        (given[1].uid, MessageStatus.ACTIVE),
    ]


# --- any history ----------------------------------------------------------------------------------------------

WORDS = st.sampled_from(["a", "b", "c", "d", "e"])
STEPS = st.one_of(
    st.tuples(st.just("put"), st.lists(WORDS, min_size=1, max_size=4)),
    st.tuples(st.just("again"), st.integers(0, 20)),
    st.tuples(st.just("archive"), st.lists(st.integers(1, 20), max_size=4)),
    st.tuples(st.just("gone"), st.lists(st.integers(1, 20), max_size=2)),
    st.tuples(st.just("oldest"), st.integers(0, 4)),
    st.tuples(st.just("align"), st.lists(WORDS, max_size=6)),
    st.tuples(st.just("clear"), st.just(())),
)


@settings(max_examples=15)
@given(st.lists(STEPS, max_size=12))
def test_head_and_totals_stay_exact_whatever_happens(steps: list[tuple[str, Any]]) -> None:
    async def play() -> None:
        async with Storage() as here:
            there = Storage(Path(here._address.url.database or ""))  # a second process
            sent: list[Entry] = []
            await put(here, "first")
            for at, (what, how) in enumerate(steps):
                log = (here, there)[at % 2].log
                if what == "put":
                    sent += (batch := entries(*how))
                    await log.append("ann", "s", batch, now=1)
                elif what == "again":
                    await log.append("ann", "s", sent[how : how + 3], now=1)
                elif what == "archive":
                    await log.archive("ann", "s", how)
                elif what == "gone":
                    await log.archive("ann", "s", how, status=GONE)
                elif what == "oldest":
                    await log.move_oldest("ann", "s", how)
                elif what == "align":
                    await log.align("ann", "s", entries(*how), now=1, room_tokens=None)
                    assert await window(here) == how
                else:
                    await log.clear("ann", "s", (ACTIVE,))
                assert await window(here) == await window(there)
                await assert_exact(here)
            await there.aclose()

    asyncio.run(play())


async def test_messages_are_read_at_their_places_by_their_owner_only(storage: Storage) -> None:
    await put(storage, "a", "b", "c")
    session = await storage.log.session("ann", "s")
    assert session is not None
    places = [(session.sid, 3), (session.sid, 1), (session.sid + 1, 1)]
    for owner, seen in (("u:ann", ["a", "c"]), ("u:bob", []), (f"s:{session.sid}", ["a", "c"]), ("s:0", [])):
        assert [stored.message.content for stored in await storage.log.at(owner, places)] == seen
    assert await storage.log.at("u:ann", []) == []


async def test_a_deleted_message_is_gone_from_window_and_history_and_its_size_from_the_total(storage: Storage) -> None:
    await storage.log.append("ann", "s", [entry("a", uid="1"), entry("b", uid="2", tokens=5)], now=storage.now())
    await storage.log.archive("ann", "s", [1])
    assert [gone.message.content for gone in await storage.log.delete("ann", "s", ["2", "1", "9"])] == ["a", "b"]
    assert (await window(storage), await history(storage)) == ([], [])
    assert await storage.log.delete("ann", "s", ["2"]) == []
    assert await storage.log.delete("ann", "other", ["2"]) == []
    await storage.log.append("ann", "s", [entry("a", uid="1")], now=storage.now())  # a late retry
    assert await history(storage) == []
    await assert_exact(storage)


async def test_of_equal_messages_a_distinct_append_stores_one(storage: Storage) -> None:
    found = [
        (await storage.log.append("ann", "s", batch, now=storage.now(), distinct=True)).stored
        for batch in (entries("a", "b", "a"), entries("b", "c"), entries("a"))
    ]
    assert found == [2, 1, 0]
    assert await window(storage) == ["a", "b", "c"]
    await assert_exact(storage)


async def test_what_is_told_about_a_message_later_is_read_with_it(storage: Storage) -> None:
    await put(storage, "a", "b")
    assert await window(storage) == ["a", "b"]
    session = await storage.log.session("ann", "s")
    assert session is not None
    await storage.log.describe(session.sid, {2: codec.encode_meta(MessageMeta(sent_from="writer"))})
    messages = (await storage.log.window("ann", "s")).messages
    assert [stored.meta.sent_from for stored in messages] == ["", "writer"]
