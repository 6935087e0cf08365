"""Records: merges happen once or not at all, indexes see what others wrote, owners never meet."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from running import MakeStorage
from sqlalchemy.ext.asyncio import AsyncConnection

from llama_index_memory_tiers import Storage
from llama_index_memory_tiers.errors import StorageError
from llama_index_memory_tiers.records import Amendment, Changes, NewRecord, Reads, Record, Scope
from llama_index_memory_tiers.storage import Entry, Hit, IndexQuery, OwnerReader, catch_up, owner_key
from llama_index_memory_tiers.storage import rows as rows_module
from llama_index_memory_tiers.storage.rows import GONE
from llama_index_memory_tiers.text import analyse

NOW = datetime(2026, 5, 1, tzinfo=timezone.utc)
OWNER = "u:ann"


def new(text: str, *, kind: str = "fact", **fields: Any) -> NewRecord:
    return NewRecord(id=str(uuid.uuid4()), kind=kind, text=text, terms=analyse(text), **fields)


def adding(*records: NewRecord) -> Callable[[Sequence[Record]], Changes]:
    return lambda _: Changes(add=records)


async def open_fence(_: AsyncConnection) -> bool:
    return True


async def closed_fence(_: AsyncConnection) -> bool:
    return False


async def commit(
    storage: Storage,
    merge: Callable[[Sequence[Record]], Changes],
    *,
    owner: str = OWNER,
    block: str = "facts",
    fence: Any = open_fence,
    epoch: int = 0,
    reads: Reads = Reads(),  # noqa: B008  # frozen
) -> Changes | None:
    return await storage.records.commit(owner, block, epoch=epoch, fence=fence, reads=reads, merge=merge)


async def texts(storage: Storage, owner: str = OWNER, *kinds: str) -> list[str]:
    return [record.text for record in await storage.records.records(owner, kinds=kinds or ("fact",))]


async def found(storage: Storage, text: str, owner: str = OWNER, **how: Any) -> list[str]:
    hits = await storage.records.search(owner, how.pop("model", ""), IndexQuery(text=text, now=NOW, **how))
    return [record.text for record in await storage.records.records_of(owner, hits)]


async def session(storage: Storage, *words: str, user_id: str = "ann", session_id: str = "s") -> int:
    """Store messages; a consumer "facts" reads from the beginning."""
    entries = [
        Entry(str(uuid.uuid4()), "user", 1, "words", 1,
              f'{{"role":"user","additional_kwargs":{{}},"blocks":[{{"block_type":"text","text":"{word}"}}]}}')
        for word in words
    ]  # fmt: skip
    return (await storage.log.append(user_id, session_id, entries, now=storage.now(), consumers=["facts"])).sid


def fence_of(storage: Storage, sid: int, me: str, lo: int, hi: int) -> Callable[[AsyncConnection], Any]:
    return lambda connection: storage.cursors.fence(connection, sid, "facts", me, lo, hi)


async def forget(storage: Storage, owner: str = OWNER) -> None:
    """What a forget does to its owner."""

    async def work(connection: AsyncConnection) -> None:
        await connection.execute(storage.records._touch, {"owner": owner, "raise_epoch": 1})

    await storage._database.write(work)


# --- merges ---------------------------------------------------------------------------------------------------


async def test_a_record_comes_back_with_all_its_fields(storage: Storage) -> None:
    record = new(
        "Ann likes tea. 猫",
        data={"subject": "Ann", "n": [1, None]},
        said_at=NOW,
        expires_at=NOW + timedelta(days=36500),
        sources=((7, 2), (7, 1), (7, 2)),
        tokens=5,
    )
    assert await commit(storage, adding(record)) == Changes(add=(record,))
    (stored,) = await storage.records.records(OWNER, kinds=["fact"])
    assert (stored.id, stored.kind, stored.block, stored.text) == (record.id, "fact", "facts", "Ann likes tea. 猫")
    assert (stored.data, stored.said_at, stored.expires_at) == (record.data, NOW, record.expires_at)
    assert stored.sources == ((7, 1), (7, 2))
    assert stored.live


async def test_text_that_no_database_takes_is_made_storable(storage: Storage) -> None:
    await commit(storage, adding(new("nul \0 and \ud800 end", data={"x": "\0\ud800"}, speaker="a\0b")))
    (stored,) = await storage.records.records(OWNER, kinds=["fact"])
    assert stored.text == "nul  and \ufffd end"
    assert stored.data == {"x": "\0\ud800"}


async def test_a_closed_fence_writes_nothing(storage: Storage) -> None:
    called = []
    assert await commit(storage, lambda records: called.append(records) or Changes(), fence=closed_fence) is None
    assert called == []
    assert await storage.records.epoch(OWNER) == 0
    assert await texts(storage) == []


async def test_only_the_worker_that_holds_the_claim_commits(storage: Storage) -> None:
    sid = await session(storage, "a", "b", "c")
    assert await storage.cursors.claim(sid, "facts", "me", now=10, until=20) == 0
    for other in (fence_of(storage, sid, "you", 0, 3), fence_of(storage, sid, "me", 1, 3)):
        assert await commit(storage, adding(new("wrong")), fence=other) is None
    assert await commit(storage, adding(new("right")), fence=fence_of(storage, sid, "me", 0, 3)) is not None
    assert await commit(storage, adding(new("again")), fence=fence_of(storage, sid, "me", 0, 3)) is None
    assert await texts(storage) == ["right"]
    assert (await storage.cursors.all(sid))["facts"].pos == 3


async def test_a_worker_whose_claim_was_taken_over_writes_nothing(storage: Storage) -> None:
    sid = await session(storage, "a")
    assert await storage.cursors.claim(sid, "facts", "slow", now=10, until=20) == 0
    assert await storage.cursors.claim(sid, "facts", "eager", now=15, until=30) is None
    assert await storage.cursors.claim(sid, "facts", "next", now=21, until=30) == 0
    assert await commit(storage, adding(new("slow")), fence=fence_of(storage, sid, "slow", 0, 1)) is None
    assert await commit(storage, adding(new("next")), fence=fence_of(storage, sid, "next", 0, 1)) is not None
    assert await texts(storage) == ["next"]


async def test_of_many_workers_on_one_range_one_commits(make_storage: MakeStorage, storage_kind: str) -> None:
    storages = [make_storage(storage_kind) for _ in range(3)]
    sid = await session(storages[0], "a", "b")

    async def work(number: int) -> Changes | None:
        one, me = storages[number % 3], f"worker {number}"
        await one.cursors.claim(sid, "facts", me, now=100 * number, until=100 * number + 1)
        await asyncio.sleep(0)
        return await commit(one, adding(new(me)), fence=fence_of(one, sid, me, 0, 2))

    done = await asyncio.gather(*(work(number) for number in range(9)))
    assert sum(changes is not None for changes in done) == 1
    assert len(await texts(storages[0])) == 1


async def test_what_was_forgotten_meanwhile_is_not_written(storage: Storage) -> None:
    sid = await session(storage, "a")
    await storage.cursors.claim(sid, "facts", "me", now=10, until=20)
    epoch = await storage.records.epoch(OWNER)
    await forget(storage)
    fence = fence_of(storage, sid, "me", 0, 1)
    assert await commit(storage, adding(new("resurrected")), fence=fence, epoch=epoch) is None
    assert await texts(storage) == []
    assert (await storage.cursors.all(sid))["facts"].pos == 0
    assert await commit(storage, adding(new("new")), fence=fence, epoch=epoch + 1) is not None


async def test_a_forget_of_another_owner_disturbs_nobody(storage: Storage) -> None:
    await forget(storage, "u:bob")
    assert await commit(storage, adding(new("mine"))) is not None


async def test_a_merge_that_raises_rolls_everything_back(storage: Storage) -> None:
    sid = await session(storage, "a")
    await storage.cursors.claim(sid, "facts", "me", now=10, until=20)

    def broken(_: Sequence[Record]) -> Changes:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await commit(storage, broken, fence=fence_of(storage, sid, "me", 0, 1))
    assert (await storage.cursors.all(sid))["facts"].pos == 0
    assert await commit(storage, adding(new("later")), fence=fence_of(storage, sid, "me", 0, 1)) is not None


async def test_two_writers_keep_one_bound(make_storage: MakeStorage, storage_kind: str) -> None:
    storages = [make_storage(storage_kind) for _ in range(3)]
    await storages[0].aopen()

    async def add(number: int) -> None:
        def merge(records: Sequence[Record]) -> Changes:
            oldest = tuple(record.id for record in records[: max(0, len(records) - 4)])
            return Changes(add=(new(f"fact {number}"),), archive=oldest)

        await commit(storages[number % 3], merge, reads=Reads(kinds=("fact",)))

    await asyncio.gather(*(add(number) for number in range(15)))
    assert len(await texts(storages[1])) == 5


async def test_a_merge_sees_its_own_blocks_live_records_and_the_ids_it_asked_for(storage: Storage) -> None:
    mine, other, expired, old = (
        new("mine"),
        new("other"),
        new("expired", expires_at=NOW - timedelta(days=9999)),
        new("old"),
    )
    await commit(storage, adding(mine, expired, old))
    await commit(storage, adding(other), block="another block")
    await commit(storage, lambda _: Changes(archive=(old.id,)))
    await commit(storage, adding(new("a stranger's")), owner="u:bob")
    seen: list[str] = []

    def merge(records: Sequence[Record]) -> Changes:
        seen[:] = sorted(record.text for record in records)
        return Changes()

    await commit(storage, merge, reads=Reads(kinds=("fact",)))
    assert seen == ["mine"]
    await commit(storage, merge, reads=Reads(ids=(old.id, other.id)))
    assert seen == ["old", "other"]
    await commit(storage, merge, reads=Reads())
    assert seen == []


async def test_a_revised_record_may_become_another_kind_and_is_searched_as_that(storage: Storage) -> None:
    draft = new("green parrots", kind="draft")
    await commit(storage, adding(draft))
    assert await found(storage, "parrots", kinds=frozenset({"draft"})) == ["green parrots"]
    await commit(storage, lambda _: Changes(revise=(replace(draft, kind="fact"),)))
    assert await texts(storage, OWNER, "draft") == await found(storage, "parrots", kinds=frozenset({"draft"})) == []
    assert await texts(storage) == await found(storage, "parrots", kinds=frozenset({"fact"})) == ["green parrots"]


async def test_superseded_and_archived_records_are_put_aside_not_deleted(storage: Storage) -> None:
    old, gone = new("lives in Rome"), new("likes tea")
    await commit(storage, adding(old, gone))
    better = new("lives in Oslo")
    await commit(storage, lambda _: Changes(add=(better,), supersede={old.id: better.id}, archive=(gone.id,)))
    assert await texts(storage) == ["lives in Oslo"]
    kept: list[Record] = []
    await commit(storage, lambda records: kept.extend(records) or Changes(), reads=Reads(ids=(old.id, gone.id)))
    assert [(record.superseded_by, record.archived_at is not None) for record in kept] == [
        (better.id, False),
        (None, True),
    ]
    assert not any(record.live for record in kept)


async def test_changes_reach_only_the_owners_own_records(storage: Storage) -> None:
    bobs = new("bob's")
    await commit(storage, adding(bobs), owner="u:bob")
    await commit(storage, lambda _: Changes(archive=(bobs.id,), supersede={bobs.id: "x"}))
    assert await texts(storage, "u:bob") == ["bob's"]


async def test_the_same_id_twice_is_refused_and_nothing_is_written(storage: Storage) -> None:
    record = new("once")
    await commit(storage, adding(record))
    with pytest.raises(Exception, match=r"(?i)unique") as caught:
        await commit(storage, adding(new("beside"), record))
    assert not isinstance(caught.value, StorageError)
    assert await texts(storage) == ["once"]


async def test_records_are_oldest_first_and_a_limit_keeps_the_newest(storage: Storage) -> None:
    for text in ("a", "b", "c"):
        await commit(storage, adding(new(text)))
    assert await texts(storage) == ["a", "b", "c"]
    assert [record.text for record in await storage.records.records(OWNER, kinds=["fact"], limit=2)] == ["b", "c"]
    assert await storage.records.records(OWNER, kinds=["summary"]) == []
    assert await storage.records.records(OWNER, kinds=["fact"], block="other") == []


# --- the index follows ----------------------------------------------------------------------------------------


async def test_an_index_sees_what_another_process_wrote(make_storage: MakeStorage, storage_kind: str) -> None:
    here, there = make_storage(storage_kind), make_storage(storage_kind)
    assert await found(here, "tea") == []
    first, second = new("Ann drinks tea"), new("Ann sells tea pots")
    await commit(there, adding(first))
    assert await found(here, "tea") == ["Ann drinks tea"]
    await commit(there, adding(second))
    assert sorted(await found(here, "tea")) == ["Ann drinks tea", "Ann sells tea pots"]
    await commit(there, lambda _: Changes(archive=(first.id,)))
    assert await found(here, "tea") == ["Ann sells tea pots"]
    third = new("Ann gave up tea")
    await commit(there, lambda _: Changes(add=(third,), supersede={second.id: third.id}))
    assert await found(here, "tea") == ["Ann gave up tea"]


async def test_an_index_is_loaded_anew_after_a_forget(make_storage: MakeStorage, storage_kind: str) -> None:
    here, there = make_storage(storage_kind), make_storage(storage_kind)
    await commit(here, adding(new("Ann drinks tea"), new("Ann drinks coffee")))
    assert len(await found(here, "drinks")) == 2
    r = there._tables.records

    async def delete(connection: AsyncConnection) -> None:
        await connection.execute(there.records._touch, {"owner": OWNER, "raise_epoch": 1})
        await connection.execute(r.delete().where(r.c.text == "Ann drinks tea"))

    await there._database.write(delete)
    hits = await here.records.search(OWNER, "", IndexQuery(text="drinks", now=NOW))
    assert len(hits) == 1
    assert await found(here, "drinks") == ["Ann drinks coffee"]


@pytest.mark.parametrize("page", [1, 3, 10, 11])
async def test_catching_up_page_by_page_misses_nothing(
    make_storage: MakeStorage, storage_kind: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = make_storage(storage_kind), make_storage(storage_kind)
    monkeypatch.setattr(catch_up, "_PAGE_ROWS", page)
    await commit(there, adding(*(new(f"tea number {n}") for n in range(7))))
    await commit(there, adding(*(new(f"tea number {n}") for n in range(7, 10))))
    assert len(await found(here, "tea")) == 10
    await commit(there, adding(*(new(f"tea number {n}") for n in range(10, 21))))
    assert len(await found(here, "tea")) == 21


async def test_catching_up_while_others_write_misses_nothing(make_storage: MakeStorage, storage_kind: str) -> None:
    here, there = make_storage(storage_kind), make_storage(storage_kind)
    await there.aopen()

    async def write(worker: int) -> None:
        for number in range(8):
            await commit(there, adding(new(f"tea {worker} {number}")))

    async def read() -> None:
        for _ in range(12):
            await found(here, "tea")

    await asyncio.gather(write(0), write(1), read(), read())
    assert len(await found(here, "tea")) == 16


async def test_many_rows_are_indexed_in_a_thread_and_found(make_storage: MakeStorage) -> None:
    storage = make_storage("private")
    await commit(storage, adding(*(new(f"tea number {n}") for n in range(700))))
    assert await found(storage, "number 613", limit=1) == ["tea number 613"]


async def test_a_warm_search_is_one_statement(storage: Storage) -> None:
    await commit(storage, adding(new("Ann drinks tea")))
    await found(storage, "tea")
    before = storage.statements
    await storage.records.search(OWNER, "", IndexQuery(text="tea", now=NOW))
    assert storage.statements - before == 1


async def test_several_warm_searches_are_one_statement(storage: Storage) -> None:
    await commit(storage, adding(new("green parrots"), new("brown otters")))
    queries = [IndexQuery(text, NOW) for text in ("parrots", "otters", "lions")]
    await storage.records.search(OWNER, "", queries[0])
    before = storage.statements
    hits = await storage.records.search_all(OWNER, "", queries)
    assert storage.statements == before + 1
    assert hits == [await storage.records.search(OWNER, "", query) for query in queries]
    assert [len(part) for part in hits] == [1, 1, 0]


async def test_vectors_belong_to_their_model(storage: Storage) -> None:
    await commit(storage, adding(new("Ann drinks tea", vector=(1.0, 0.0), model="m1")))
    await commit(storage, adding(new("Ann has a cat", vector=(0.0, 1.0), model="m2")))
    assert await found(storage, "zzz", vector=(1.0, 0.0), model="m1") == ["Ann drinks tea"]
    assert await found(storage, "zzz", vector=(0.0, 1.0), model="m2") == ["Ann has a cat"]


# --- owners ---------------------------------------------------------------------------------------------------

OWNERS = ("u:ann", "u:Ann", "u:ann ", "u:an%", "u:a_n", "s:1", "u:s:1", "u:约翰")


async def test_rows_of_other_owners_are_never_returned(storage: Storage) -> None:
    marked = {owner: new(f"tea of {owner}") for owner in OWNERS}
    for owner, record in marked.items():
        await commit(storage, adding(record), owner=owner)
    everything = {record.id: 1.0 for record in marked.values()}
    stolen = [hit for owner in OWNERS for hit in await storage.records.search(owner, "", IndexQuery("tea", NOW))]
    assert len(stolen) == len(OWNERS)
    for owner in OWNERS:
        mine = [f"tea of {owner}"]
        reader = OwnerReader(storage.records, owner, "facts")
        assert await texts(storage, owner) == await found(storage, "tea", owner) == mine
        assert [record.text for record in await reader.records("fact")] == mine
        assert [record.text for record in await reader.records_of(stolen)] == mine
        assert [record.text for record in await reader.records_of(await reader.hits_of(everything))] == mine


async def test_texts_come_from_the_database_whatever_an_index_says(storage: Storage) -> None:
    record = new("Ann drinks tea")
    await commit(storage, adding(record))
    hits = await storage.records.search(OWNER, "", IndexQuery("tea", NOW))
    await commit(storage, lambda _: Changes(archive=(record.id,)))
    assert await storage.records.records_of(OWNER, hits) == []
    assert await storage.records.hits_of(OWNER, {record.id: 1.0}) == []
    unknown = Hit(id=987_654, score=1.0, legs={}, place=None, tokens=1, said_at=None, speaker="")
    assert await storage.records.records_of(OWNER, [unknown]) == []


async def test_messages_are_recalled_in_the_order_of_the_hits_until_they_are_forgotten(storage: Storage) -> None:
    sid = await session(storage, "tea", "tea tea", "coffee")
    records = [
        new(word, kind="message", sources=((sid, seq),)) for seq, word in enumerate(("tea", "tea tea", "coffee"), 1)
    ]
    await commit(storage, adding(*records), block="vectors")
    hits = await storage.records.search(OWNER, "", IndexQuery("tea coffee", NOW))
    recalled = await storage.records.messages_of(OWNER, hits)
    assert [one.hit for one in recalled] == hits
    assert {one.message.message.content for one in recalled} == {"tea", "tea tea", "coffee"}
    assert {one.message.place for one in recalled} == {(sid, 1), (sid, 2), (sid, 3)}
    await storage.log.archive("ann", "s", [2], status=GONE)
    left = await storage.records.messages_of(OWNER, hits)
    assert sorted(one.message.message.content or "" for one in left) == ["coffee", "tea"]
    assert await storage.records.messages_of("u:bob", hits) == []


async def test_what_has_expired_is_gone_at_once(make_storage: MakeStorage, storage_kind: str) -> None:
    now = NOW
    storage = make_storage(storage_kind, clock=lambda: now)
    await commit(storage, adding(new("tea today", expires_at=NOW + timedelta(hours=1)), new("tea always")))
    hits = await storage.records.search(OWNER, "", IndexQuery("tea", now))
    assert len(hits) == 2
    now = NOW + timedelta(hours=1)
    assert await texts(storage) == ["tea always"]
    assert [record.text for record in await storage.records.records_of(OWNER, hits)] == ["tea always"]
    assert len(await storage.records.search(OWNER, "", IndexQuery("tea", now))) == 1


def test_owner_keys_cannot_be_mistaken_for_each_other() -> None:
    assert owner_key(Scope("s", "ann"), 7) == "u:ann"
    assert owner_key(Scope("s", "ann"), 7, per_session=True) == "s:7"
    assert owner_key(Scope("s"), 7) == "s:7"
    assert owner_key(Scope("s", "s:7"), 1) == "u:s:7"


async def test_any_number_of_hits_is_read_a_few_hundred_at_a_time(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "MOST_PARAMETERS", 3)
    sid = await session(storage, *(f"tea {number}" for number in range(8)))
    records = [new(f"tea {n}", kind="message", sources=((sid, n + 1),)) for n in range(8)]
    await commit(storage, adding(*records))
    hits = await storage.records.search(OWNER, "", IndexQuery(text="tea", now=NOW))
    assert len(hits) == 8
    before = storage.statements
    assert [found.hit for found in await storage.records.messages_of(OWNER, hits)] == hits
    assert storage.statements - before == 3
    assert len(await storage.records.records_of(OWNER, hits)) == 8
    assert all(record.sources for record in await storage.records.records_of(OWNER, hits))
    scores = {record.id: float(n) for n, record in enumerate(records)}
    assert [hit.score for hit in await storage.records.hits_of(OWNER, scores)] == [7, 6, 5, 4, 3, 2, 1, 0]


async def test_an_index_that_is_empty_is_remembered_as_well(storage: Storage) -> None:
    record = new("tea")
    await commit(storage, adding(record))
    await commit(storage, lambda _: Changes(archive=(record.id,)))
    assert await found(storage, "tea") == []
    index = storage.records.indexes._cache.get((OWNER, ""))
    assert index is not None
    assert await found(storage, "tea") == []
    assert storage.records.indexes._cache.get((OWNER, "")) is index


async def test_an_amended_record_keeps_its_text_and_is_found_until_it_expires(storage: Storage) -> None:
    record = new("green parrots", data={"a": 1})
    await commit(storage, adding(record))
    later = NOW + timedelta(days=99_000)
    await commit(storage, lambda _: Changes(amend={record.id: Amendment({"b": 2}, later)}))
    (kept,) = await storage.records.records(OWNER, kinds=["fact"])
    assert (kept.text, dict(kept.data), kept.expires_at) == ("green parrots", {"b": 2}, later)
    assert await found(storage, "parrots") == ["green parrots"]
    await commit(storage, lambda _: Changes(amend={record.id: Amendment({}, NOW - timedelta(days=99))}))
    assert (await texts(storage), await found(storage, "parrots")) == ([], [])


async def test_nobody_amends_the_record_of_another_owner(storage: Storage) -> None:
    record = new("green parrots", data={"a": 1})
    await commit(storage, adding(record))
    await commit(storage, lambda _: Changes(amend={record.id: Amendment({"b": 2})}), owner="u:bob")
    assert [dict(kept.data) for kept in await storage.records.records(OWNER, kinds=["fact"])] == [{"a": 1}]


async def test_what_is_over_when_it_comes_is_written_and_seen_with_the_past_only(storage: Storage) -> None:
    old, now = new("old"), new("now")
    await commit(storage, lambda _: Changes(add=(old, now), supersede={old.id: now.id}))
    assert await texts(storage) == ["now"]
    past = await storage.records.records(OWNER, kinds=["fact"], past=True)
    assert [(record.text, record.superseded_by) for record in past] == [("old", now.id), ("now", None)]
    seen: list[str] = []

    def look(records: Sequence[Record]) -> Changes:
        seen.extend(record.text for record in records)
        return Changes()

    await commit(storage, look, reads=Reads(kinds=("fact",), past=True))
    assert seen == ["old", "now"]
