"""What belongs to records, on every database: parts, embeddings, messages behind them, visits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from doubles import Clock, rows
from llama_index.core.base.llms.types import ChatMessage

from llama_index_memory_tiers import Storage, TieredMemory
from llama_index_memory_tiers.records import Changes, NewRecord, Reads, Record
from llama_index_memory_tiers.storage import OwnerReader, schema
from llama_index_memory_tiers.storage import made as made_module
from llama_index_memory_tiers.storage.schema import VERSION

ANN, BOB = "u:ann", "u:bob"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def storage(make_storage: Callable[..., Storage], storage_kind: str, clock: Clock) -> Storage:
    return make_storage(storage_kind, clock=clock)


async def change(storage: Storage, owner: str = ANN, **changes: Any) -> None:
    await storage.records.change(owner, "b", reads=Reads(), merge=lambda _: Changes(**changes))


def reader(storage: Storage, owner: str = ANN) -> OwnerReader:
    return OwnerReader(storage.records, owner, "b")


async def told(storage: Storage, *texts: str, user: str = "ann") -> int:
    memory = TieredMemory(storage=storage, user_id=user, session_id="s")
    await memory.aput_messages([ChatMessage(role="user", content=text) for text in texts])
    session = await storage.log.session(user, "s")
    assert session is not None
    return session.sid


async def test_visits_count_up_per_record_and_owner(storage: Storage, clock: Clock) -> None:
    await change(storage, add=(NewRecord("a", "segment"), NewRecord("b", "segment"), NewRecord("f", "fact")))
    await change(storage, BOB, add=(NewRecord("x", "segment"),))
    parts = storage.records.parts
    await parts.visit(ANN, ["a", "x"])
    clock.pass_seconds(60)
    await parts.visit(ANN, ["a", "f", "nobody's"])
    found = await reader(storage).visits("segment")
    assert {one: seen.count for one, seen in found.items()} == {"a": 2}
    assert found["a"].last_at == clock.now
    assert set(await parts.visits(ANN)) == {"a", "f"}
    assert await parts.visits(BOB) == {}
    await parts.visit(ANN, [])


async def test_a_clock_that_steps_back_makes_no_visit_older(storage: Storage, clock: Clock) -> None:
    await change(storage, add=(NewRecord("a", "segment"),))
    await storage.records.parts.visit(ANN, ["a"])
    newest = clock.now
    clock.pass_seconds(-3600)
    await storage.records.parts.visit(ANN, ["a"])
    seen = (await reader(storage).visits("segment"))["a"]
    assert (seen.count, seen.last_at) == (2, newest)


async def test_a_visit_changes_nothing_else(storage: Storage) -> None:
    await change(storage, add=(NewRecord("a", "segment"),))
    before = [tuple(row) for row in await rows(storage, "SELECT * FROM {t}_records")]
    revision = [tuple(row) for row in await rows(storage, "SELECT * FROM {t}_owners")]
    await storage.records.parts.visit(ANN, ["a"])
    assert [tuple(row) for row in await rows(storage, "SELECT * FROM {t}_records")] == before
    assert [tuple(row) for row in await rows(storage, "SELECT * FROM {t}_owners")] == revision


async def test_parts_are_those_of_their_owner_and_live(storage: Storage) -> None:
    pages = tuple(NewRecord(f"p{n}", "page", parent="seg") for n in range(3))
    await change(storage, add=(NewRecord("seg", "segment"), *pages, NewRecord("q", "page", parent="other")))
    await change(storage, BOB, add=(NewRecord("theirs", "page", parent="seg"),))
    await change(storage, archive=("p1",))
    own = reader(storage)
    assert [part.id for part in await own.parts_of(["seg"], "page")] == ["p0", "p2"]
    assert [part.parent for part in await own.parts_of(["seg", "other"], "page")] == ["seg", "seg", "other"]
    assert await own.parts_of([], "page") == []
    assert [one.id for one in await own.by_ids(["p1", "theirs", "none"])] == ["p1"]
    assert [one.id for one in await own.history("page")] == ["p0", "p1", "p2", "q"]
    assert [one.id for one in await own.light("page")] == ["p0", "p2", "q"]


async def test_what_is_added_may_be_put_aside_in_the_same_change(storage: Storage) -> None:
    await change(storage, add=(NewRecord("a", "segment"), NewRecord("b", "segment")), archive=("a",))
    assert [one.id for one in await reader(storage).light("segment")] == ["b"]


async def test_the_latest_record_is_that_of_the_newest_message_up_to_a_place(storage: Storage) -> None:
    sid = await told(storage, "one", "two", "three")
    await change(
        storage,
        add=(
            NewRecord("early", "page", sources=((sid, 1), (sid, 2))),
            NewRecord("late", "page", sources=((sid, 3),)),
            NewRecord("fact", "fact", sources=((sid, 3),)),
        ),
    )
    own = reader(storage)
    found = [await own.latest("page", sid, upto) for upto in (0, 1, 2, 3, 9)]
    assert [one.id if one else None for one in found] == [None, "early", "early", "late", "late"]
    assert await reader(storage, BOB).latest("page", sid, 9) is None


async def test_messages_behind_records_come_in_the_order_of_the_log(storage: Storage) -> None:
    sid = await told(storage, "one", "two", "three")
    await change(storage, add=(NewRecord("p", "page", sources=((sid, 3), (sid, 1))), NewRecord("q", "page")))
    found = await reader(storage).messages_behind(["p", "q"])
    assert {one: [stored.text for stored in messages] for one, messages in found.items()} == {"p": ["one", "three"]}
    assert await reader(storage, BOB).messages_behind(["p"]) == {}
    await change(storage, archive=("p",))
    assert await reader(storage).messages_behind(["p"]) == {}


async def test_embeddings_are_read_by_their_model(storage: Storage) -> None:
    await change(storage, add=(NewRecord("a", "page", vector=(3.0, 4.0), model="m"), NewRecord("b", "page")))
    found = await reader(storage).vectors(["a", "b"], "m")
    assert list(found) == ["a"]
    assert found["a"].tolist() == pytest.approx([0.6, 0.8], abs=1e-3)
    assert await reader(storage).vectors(["a"], "another") == {}
    assert await reader(storage, BOB).vectors(["a"], "m") == {}


async def test_what_was_made_of_records_is_made_anew_when_they_change(storage: Storage) -> None:
    made: list[int] = []

    async def make() -> int:
        made.append(len(await reader(storage).light("page")))
        return made[-1]

    own = reader(storage)
    assert [await own.remembered("count", make) for _ in range(2)] == [0, 0]
    await change(storage, add=(NewRecord("a", "page"),))
    assert [await own.remembered("count", make) for _ in range(3)] == [1, 1, 1]
    await storage.records.parts.visit(ANN, ["a"])
    await change(storage, BOB, add=(NewRecord("b", "page"),))
    assert await own.remembered("count", make) == 1
    assert made == [0, 1]


async def test_what_is_in_use_is_kept_while_others_come_and_go(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_module, "_MOST", 3)
    made: list[str] = []

    async def use(name: str) -> None:
        async def make() -> str:
            made.append(name)
            return name

        assert await reader(storage, f"u:{name}").remembered("name", make) == name

    for other in ("one", "two", "three", "four", "five"):
        await use("busy")
        await use(other)
    assert made == ["busy", "one", "two", "three", "four", "five"]
    await use("one")  # has had to go
    assert made[-1] == "one"


async def test_what_follows_records_is_told_of_those_that_changed_alone(storage: Storage) -> None:
    told_of: list[tuple[Any, list[str]]] = []

    async def take(before: Any, records: Sequence[Record]) -> frozenset[str]:
        told_of.append((before, [record.id for record in records]))
        gone = {record.id for record in records if not record.live}
        return (before or frozenset()).union(record.id for record in records) - gone

    async def followed() -> frozenset[str]:
        found: frozenset[str] = await reader(storage).followed("ids", ("page",), take)
        return found

    await change(storage, add=(NewRecord("a", "page"), NewRecord("b", "page"), NewRecord("f", "fact")))
    assert await followed() == await followed() == {"a", "b"}
    await change(storage, add=(NewRecord("c", "page"),), archive=("a",))
    await change(storage, BOB, add=(NewRecord("x", "page"),))
    assert await followed() == {"b", "c"}
    await change(storage, restore=("a",))
    assert await followed() == {"a", "b", "c"}
    assert told_of == [(None, ["a", "b"]), ({"a", "b"}, ["a", "c"]), ({"b", "c"}, ["a"])]
    await TieredMemory(storage=storage, user_id="ann", session_id="s").aforget(scope="user")
    assert await followed() == frozenset()
    assert told_of[3:] == [(None, [])]


async def test_a_database_of_the_first_version_keeps_its_records(
    make_storage: Callable[..., Storage], storage_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"table_name": "old_tables"}
    with monkeypatch.context() as patch:
        patch.setattr(schema, "_MIGRATIONS", schema._MIGRATIONS[:1])
        patch.setattr(schema, "VERSION", 1)
        old = make_storage(storage_kind, **place)
        old._database.after_open = None  # the first version had nothing to finish
        await old.aopen()
        stated = "INSERT INTO {t}_records (uid, owner, rev, kind, block, text, data, created_at) VALUES "
        prefix = f'"{old.db_schema}".{old.table_name}' if old.db_schema else old.table_name

        async def work(connection: Any) -> None:
            from sqlalchemy import text  # noqa: PLC0415  # here only

            await connection.execute(
                text((stated + "('a', 'u:ann', 1, 'fact', 'b', 'kept', '{{}}', 1)").format(t=prefix))
            )

        await old._database.write(work)
        await old.aclose()
    new = make_storage(storage_kind, **place)
    assert [(one.text, one.parent) for one in await reader(new).light("fact")] == [("kept", None)]
    await new.records.parts.visit(ANN, ["a"])
    assert (await reader(new).visits("fact"))["a"].count == 1
    assert [tuple(row) for row in await rows(new, "SELECT max(version) FROM {t}_schema")] == [(VERSION,)]


async def test_a_record_of_a_long_session_is_read_in_a_time_that_grows_with_its_messages(storage: Storage) -> None:
    await told(storage, "hello")
    places = tuple((1, seq) for seq in range(1, 40_001))
    await change(storage, add=(NewRecord("long", "summary", sources=places), NewRecord("short", "summary")))

    async def seconds(read: Callable[[], Any]) -> float:
        began = time.perf_counter()
        found = await read()
        took = time.perf_counter() - began
        assert [getattr(one, "sources", ()) for one in found] == [places, ()]
        return took

    async def surveyed() -> list[Record]:
        return [record for _, record in await storage.survey.records("ann")]

    # Where each place made a new tuple of those before, each of these took four seconds and more.
    assert await seconds(lambda: storage.records.records(ANN, kinds=["summary"])) < 1.5
    assert await seconds(lambda: storage.records.parts.by_ids(ANN, ["long", "short"])) < 1.5
    assert await seconds(surveyed) < 1.5
