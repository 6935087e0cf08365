"""Qdrant behind the seam: finds what the owner index finds, never more, and the chat goes on without it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from doubles import hearing, said
from qdrant_client import AsyncQdrantClient, QdrantClient, models
from running import SOAK, MakeStorage
from sqlalchemy import select

from llama_index_memory_tiers import Storage, TieredMemory, VectorMemoryBlock, failpoints
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.events import IndexDegraded
from llama_index_memory_tiers.records import Changes, NewRecord, Reads
from llama_index_memory_tiers.storage import Hit, IndexQuery
from llama_index_memory_tiers.storage import keeper as keeper_module
from llama_index_memory_tiers.storage import outside as outside_module
from llama_index_memory_tiers.storage.index.qdrant import QdrantIndex
from llama_index_memory_tiers.storage.index.seam import Candidates, Space, VectorIndex, point_id
from llama_index_memory_tiers.testing import HashEmbedding
from llama_index_memory_tiers.text import message_terms

pytestmark = pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")

NOW = datetime(2026, 5, 1, 12, tzinfo=timezone.utc)
OWNER, MODEL, SIZE = "u:ann", "m", 8
WORDS = ["tea", "coffee", "dog", "cat", "paris", "tokyo", "piano", "bike", "猫", "茶"]
# Not Hypothesis: each world takes a second, and a shorter seed is no simpler world.
SEEDS = range(200 if SOAK else 6)
PEOPLE = ["Ann", "Bob", "Cleo"]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that others load, local mode takes longer than a server may."""
    monkeypatch.setattr(outside_module, "_TIMEOUT_SECONDS", 60.0)


@pytest.fixture
async def client() -> AsyncIterator[AsyncQdrantClient]:
    made = AsyncQdrantClient(":memory:")
    yield made
    await made.close()


@pytest.fixture
def degraded() -> Iterator[list[str]]:
    with hearing(IndexDegraded, lambda event: event.error) as errors:
        yield errors


class Failing:
    """An index that can be switched off, or cut off after so many calls."""

    def __init__(self, inner: VectorIndex) -> None:
        self.inner = inner
        self.left: int | None = None
        self.calls: list[str] = []

    async def _call(self, name: str, *given: Any) -> Any:
        if self.left is not None:
            if self.left <= 0:
                raise ConnectionError("no route to host")
            self.left -= 1
        self.calls.append(name)
        return await getattr(self.inner, name)(*given)

    async def prepare(self, *given: Any) -> None:
        await self._call("prepare", *given)

    async def put(self, *given: Any) -> None:
        await self._call("put", *given)

    async def drop(self, *given: Any) -> None:
        await self._call("drop", *given)

    async def held(self, *given: Any) -> Any:
        return await self._call("held", *given)

    async def candidates(self, *given: Any) -> Candidates:
        found: Candidates = await self._call("candidates", *given)
        return found


def vector_of(rng: random.Random, size: int = SIZE) -> tuple[float, ...]:
    return tuple(rng.gauss(0, 1) + 0.5 for _ in range(size))


def record(rng: random.Random, storage: Storage, **fields: Any) -> NewRecord:
    words = " ".join(rng.choices([*WORDS, "two hours"], k=rng.randint(1, 6))) + rng.choice(["", "?"])
    said_at = NOW - timedelta(days=rng.randint(0, 90), minutes=rng.randint(0, 600))
    speaker = rng.choice(PEOPLE)
    made = {
        "id": storage.ids(), "kind": "fact", "text": words, "said_at": said_at, "speaker": speaker, "model": MODEL,
        "terms": message_terms(words, speaker=speaker, when=said_at), "tokens": len(words), "vector": vector_of(rng),
    }  # fmt: skip
    return NewRecord(**{**made, **fields})


async def change(storage: Storage, changes: Changes, owner: str = OWNER, block: str = "vector") -> None:
    await storage.records.change(owner, block, reads=Reads(), merge=lambda _: changes)


async def inside(storage: Storage, query: IndexQuery, model: str = MODEL, owner: str = OWNER) -> list[Hit]:
    """What the owner index finds."""
    return (await storage.records.indexes.up_to_date(owner, model)).search(query)


async def outside(storage: Storage, query: IndexQuery, model: str = MODEL, owner: str = OWNER) -> list[Hit]:
    """What Qdrant finds; nothing else may answer."""
    assert storage.records.finder.outside is not None
    hits = await storage.records.finder.outside.search(owner, model, query)
    assert hits is not None
    return hits


async def points(storage: Storage, client: AsyncQdrantClient) -> list[models.Record]:
    found: list[models.Record] = []
    for collection in (await client.get_collections()).collections:
        found += (await client.scroll(collection.name, limit=10_000, with_vectors=True))[0]
    return found


def dense_of(point: models.Record) -> list[Any]:
    held: Any = point.vector
    return list(held.get("dense", ()))


def alike(found: Sequence[Hit], expected: Sequence[Hit]) -> None:
    """The same hits with the same scores; what has the same score may change places."""
    assert {hit.id for hit in found} == {hit.id for hit in expected}
    by_id = {hit.id: hit for hit in found}
    for hit in expected:
        assert by_id[hit.id].score == pytest.approx(hit.score, abs=1e-4)
        for leg in hit.legs.keys() | by_id[hit.id].legs.keys():  # a leg of zero is left out
            assert by_id[hit.id].legs.get(leg, 0.0) == pytest.approx(hit.legs.get(leg, 0.0), abs=1e-4)
    scores = [hit.score for hit in found]
    assert scores == sorted(scores, reverse=True)


# --- equality -------------------------------------------------------------------------------------------------


class World:
    """Random operations on two owners' records."""

    def __init__(self, storage: Storage, seed: int) -> None:
        self.storage = storage
        self.rng = random.Random(seed)
        self.heads = {1: 0, 2: 0}

    async def step(self, owner: str) -> None:
        rng, live = self.rng, await self.storage.records.records(owner, kinds=["fact", "message"])
        kind = rng.choice(["facts", "messages", "messages", "archive", "restore", "supersede", "revise", "amend"])
        new = record(rng, self.storage)
        if kind == "messages" or not live:
            await change(self.storage, Changes(add=tuple(self.message() for _ in range(rng.randint(1, 5)))), owner)
        elif kind == "facts":
            await change(self.storage, Changes(add=(new,)), owner, "facts")
        elif kind == "archive":
            await change(self.storage, Changes(archive=(rng.choice(live).id,)), owner)
        elif kind == "restore":
            past = await self.storage.records.records(owner, kinds=["fact", "message"], past=True)
            await change(self.storage, Changes(restore=(rng.choice(past).id,)), owner)
        elif kind == "supersede":
            await change(self.storage, Changes(add=(new,), supersede={rng.choice(live).id: new.id}), owner)
        elif kind == "revise":
            facts = [one for one in live if one.kind == "fact"]
            if facts:
                revised = record(rng, self.storage, id=rng.choice(facts).id)
                await change(self.storage, Changes(revise=(revised,)), owner)

    def message(self) -> NewRecord:
        sid = self.rng.choice([1, 2])
        self.heads[sid] += 1
        said_at = NOW - timedelta(days=3 * sid) + timedelta(minutes=self.heads[sid])
        gone = self.rng.random() < 0.1
        return record(
            self.rng, self.storage, kind="message", sources=((sid, self.heads[sid]),), said_at=said_at,
            vector=None if self.rng.random() < 0.1 else vector_of(self.rng),
            expires_at=NOW - timedelta(days=1) if gone else None,
        )  # fmt: skip

    def question(self) -> IndexQuery:
        rng = self.rng
        text = " ".join(rng.choices([*WORDS, "pet", "drink"], k=rng.randint(1, 3))) + rng.choice(
            ["", " Ann", " in April", " yesterday", " how long"]
        )
        return IndexQuery(
            text=text,
            now=NOW,
            vector=vector_of(rng),
            kinds=rng.choice([None, frozenset({"message"}), frozenset({"fact"})]),
            blocks=rng.choice([None, frozenset({"vector"}), frozenset({"facts"})]),
            since=rng.choice([None, NOW - timedelta(days=4)]),
            until=rng.choice([None, NOW - timedelta(days=2)]),
            sessions=rng.choice([None, None, frozenset({1})]),
            exclude=frozenset((1, n) for n in range(1, rng.randint(1, 6))),
            limit=rng.choice([5, 200]),
        )


@pytest.fixture(params=["local", "edge"])
async def twin(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[VectorIndex]:
    """Qdrant's local mode, written in Python, and the engine of its server, where that is installed."""
    if request.param == "edge":
        pytest.importorskip("qdrant_edge")
        from tests.edge import EdgeClient  # noqa: PLC0415  # needs the engine

    made: Any = AsyncQdrantClient(":memory:") if request.param == "local" else EdgeClient(tmp_path)
    yield QdrantIndex(made)
    await made.close()


@pytest.mark.parametrize("seed", SEEDS)
async def test_qdrant_finds_what_the_owner_index_finds(seed: int, twin: VectorIndex) -> None:
    async with Storage(vectors=twin, clock=lambda: NOW) as storage:
        world = World(storage, seed)
        for _ in range(3):
            for owner in (OWNER, OWNER, OWNER, "u:bob"):
                await world.step(owner)
            state = await storage.sync_index()
            assert state.in_step
            assert state.pending == 0
            for _ in range(3):
                query = world.question()
                expected = await inside(storage, query)
                found = await outside(storage, query)
                if query.limit > 100:
                    alike(found, expected)
                else:
                    assert [h.score for h in found] == pytest.approx([h.score for h in expected], abs=1e-4)


@pytest.mark.parametrize("seed", SEEDS)
async def test_by_words_alone_it_finds_what_shares_a_word_or_stands_beside(seed: int, twin: VectorIndex) -> None:
    """Rows without evidence of their own, found by their session alone, may be missing: nothing else may."""
    async with Storage(vectors=twin, clock=lambda: NOW) as storage:
        world = World(storage, seed)
        await change(storage, Changes(add=tuple(world.message() for _ in range(40))))
        await storage.sync_index()
        query = IndexQuery(text="tea Ann", now=NOW, limit=500)
        expected = {hit.id: hit for hit in await inside(storage, query)}
        found = {hit.id: hit for hit in await outside(storage, query)}
        assert found.keys() <= expected.keys()
        assert all("bm25" not in expected[missing].legs for missing in expected.keys() - found.keys())
        for number, hit in found.items():
            assert hit.score == pytest.approx(expected[number].score, abs=1e-4)


async def test_of_many_records_the_best_are_the_same(
    client: AsyncQdrantClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside_module, "_FEWEST", 40)
    monkeypatch.setattr(outside_module, "_MOST", 40)
    rng = random.Random(7)
    async with Storage(vectors=client, clock=lambda: NOW) as storage:
        for _ in range(3):
            await change(storage, Changes(add=tuple(record(rng, storage) for _ in range(100))))
        await storage.sync_index()
        kept = 0
        for _ in range(8):
            query = IndexQuery(text=" ".join(rng.choices(WORDS, k=2)), now=NOW, vector=vector_of(rng), limit=10)
            best = [hit.id for hit in await inside(storage, query)]
            kept += len({hit.id for hit in await outside(storage, query)} & set(best))
    assert kept >= 0.95 * 8 * 10  # with a seventh of the records per leg


# --- scope, and what is not so ----------------------------------------------------------------------------------


async def test_no_leg_reaches_another_owner(client: AsyncQdrantClient) -> None:
    rng = random.Random(1)
    same = vector_of(rng)
    async with Storage(vectors=client, clock=lambda: NOW) as storage:
        for owner in (OWNER, "u:an", "u:ann%", "s:1"):
            await change(
                storage, Changes(add=tuple(record(rng, storage, text="tea", vector=same) for _ in range(5))), owner
            )
        await storage.sync_index()
        keeper = storage._keeper
        assert keeper is not None
        asked = {
            "by meaning": IndexQuery(text="zzz", now=NOW, vector=same),
            "by words": IndexQuery(text=" ".join(WORDS), now=NOW),
            "by speaker": IndexQuery(text="What did Ann say?", now=NOW, vector=same),
            "by date": IndexQuery(text="in April", now=NOW, vector=same),
        }
        mine = set(await keeper.marks.alive(OWNER, range(1, 100)))
        for leg, query in asked.items():
            hits = await outside(storage, query)
            assert {hit.id for hit in hits} <= mine, leg


async def test_a_word_that_others_use_weighs_nothing_here(client: AsyncQdrantClient) -> None:
    rng = random.Random(2)
    async with Storage(vectors=client, clock=lambda: NOW) as storage:
        await change(storage, Changes(add=tuple(record(rng, storage) for _ in range(20))))
        await storage.sync_index()
        query = IndexQuery(text="tea dog", now=NOW)
        before = await outside(storage, query)
        await change(storage, Changes(add=tuple(record(rng, storage) for _ in range(200))), "u:bob")
        await storage.sync_index()
        alike(await outside(storage, query), before)


async def test_a_planted_or_stale_point_neither_leaks_nor_resurrects(client: AsyncQdrantClient) -> None:
    rng = random.Random(3)
    async with Storage(vectors=client, clock=lambda: NOW) as storage:
        await change(storage, Changes(add=(record(rng, storage, text="mine", id="mine"),)))
        await change(storage, Changes(add=(record(rng, storage, text="bob's", id="bobs"),)), "u:bob")
        await change(storage, Changes(add=(record(rng, storage, text="old", id="old"),)))
        await storage.sync_index()
        (space,) = [c.name for c in (await client.get_collections()).collections]
        held = await points(storage, client)
        kept = {point.payload["record"]: point for point in held if point.payload}
        await change(storage, Changes(archive=("old",)))
        await storage.sync_index()
        # Bob's record and the one put aside under Ann's name, and one that never was.
        for number, point in [*kept.items(), (999, held[0])]:
            planted = {**(point.payload or {}), "owner": OWNER, "record": number}
            struct = models.PointStruct(id=number, vector=point.vector or {}, payload=planted)
            await client.upsert(space, [struct])
        query = IndexQuery(text=" ".join(WORDS), now=NOW, vector=vector_of(rng))
        found = await storage.records.records_of(OWNER, await outside(storage, query))
        assert [one.text for one in found] == ["mine"]


# --- following the database -----------------------------------------------------------------------------------


async def test_what_was_just_said_is_found_before_the_index_knows(client: AsyncQdrantClient) -> None:
    rng = random.Random(4)
    index = Failing(QdrantIndex(client))
    async with Storage(vectors=index, clock=lambda: NOW) as storage:
        await change(storage, Changes(add=(record(rng, storage),)))
        await storage.sync_index()
        puts = index.calls.count("put")
        await change(storage, Changes(add=(record(rng, storage, id="new", text="violin", terms={"violin": 1}),)))
        hits = await outside(storage, IndexQuery(text="violin", now=NOW))
        assert index.calls.count("put") == puts
        assert [one.id for one in await storage.records.records_of(OWNER, hits)] == ["new"]


async def test_a_change_is_told_in_the_background(client: AsyncQdrantClient) -> None:
    rng = random.Random(5)
    async with Storage(vectors=client, clock=lambda: NOW) as storage:
        await change(storage, Changes(add=(record(rng, storage),)))
        await storage.sync_index()
        await change(storage, Changes(add=(record(rng, storage),)))
        assert storage._keeper is not None
        await storage._keeper.settle()
        assert (await storage.index_state()).in_step
        assert len(await points(storage, client)) == 2


async def test_who_asks_for_all_to_be_told_waits_for_what_is_being_told(client: AsyncQdrantClient) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    class SlowAtFirst(QdrantIndex):
        async def prepare(self, space: Space) -> None:
            if not begun.is_set():
                begun.set()
                await asyncio.sleep(0.2)
                ended.set()
            await super().prepare(space)

    async with Storage(vectors=SlowAtFirst(client), clock=lambda: NOW) as storage:
        await change(storage, Changes(add=(record(random.Random(0), storage),)))
        assert storage._keeper is not None
        storage._keeper.soon(OWNER, MODEL)
        await begun.wait()
        assert (await storage.sync_index()).in_step
        assert ended.is_set()


async def test_who_asks_for_all_to_be_told_waits_for_nobody_who_writes_without_a_pause(
    client: AsyncQdrantClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "_BACKGROUND_SECONDS", 0.05)
    rng = random.Random(3)

    async with Storage(clock=lambda: NOW) as storage:

        class WritesMeanwhile(QdrantIndex):
            async def put(self, space: Space, points: Sequence[Any]) -> None:
                await change(storage, Changes(add=(record(rng, storage),)))
                await super().put(space, points)

        async with Storage(
            storage._address.url.database, vectors=WritesMeanwhile(client), clock=lambda: NOW
        ) as telling:
            await change(storage, Changes(add=(record(rng, storage),)))
            state = await asyncio.wait_for(telling.sync_index(), 20)
            assert (state.owners, state.pending) == (1, 1)
            held = {point.payload["record"] for point in await points(storage, client) if point.payload}
            assert held == {1}


async def test_changes_of_a_process_without_the_index_are_told_as_well(
    make_storage: MakeStorage, storage_kind: str, client: AsyncQdrantClient
) -> None:
    rng = random.Random(6)
    without, storage = make_storage(storage_kind), make_storage(storage_kind, vectors=client, clock=lambda: NOW)
    await change(without, Changes(add=(record(rng, without), record(rng, without, id="old"))))
    state = await storage.index_state()
    assert (state.attached, state.owners, state.pending, state.in_step) == (True, 1, 2, False)
    told: list[tuple[int, int]] = []
    assert (await storage.sync_index(lambda done, total: told.append((done, total)))).in_step
    assert told == [(1, 1)]
    await change(without, Changes(archive=("old",)))
    assert (await storage.index_state()).pending == 1
    await storage.sync_index()
    assert len(await points(storage, client)) == 1
    assert not (await without.index_state()).attached


async def test_telling_twice_is_telling_once(client: AsyncQdrantClient) -> None:
    rng = random.Random(8)
    index = Failing(QdrantIndex(client))
    async with Storage(vectors=index, clock=lambda: NOW) as storage:
        await change(storage, Changes(add=tuple(record(rng, storage) for _ in range(5))))
        await storage.sync_index()
        before = [(point.id, point.payload) for point in await points(storage, client)]
        marks = storage._tables.marks

        async def again(connection: Any) -> None:
            await connection.execute(marks.update().values(rev=0))

        await storage._database.write(again)
        assert (await storage.sync_index()).in_step
        assert [(point.id, point.payload) for point in await points(storage, client)] == before
        calls = len(index.calls)
        await storage.sync_index()
        assert len(index.calls) == calls


async def test_a_server_that_was_emptied_is_told_again_when_asked(
    client: AsyncQdrantClient, degraded: list[str]
) -> None:
    rng = random.Random(14)
    async with Storage(vectors=client, clock=lambda: NOW) as storage:
        await change(storage, Changes(add=(record(rng, storage),)))
        await storage.sync_index()
        for collection in (await client.get_collections()).collections:
            await client.delete_collection(collection.name)
        query = IndexQuery(text=" ".join(WORDS), now=NOW, vector=vector_of(rng))
        assert len(await storage.records.search(OWNER, MODEL, query)) == 1
        assert len(degraded) == 1
        assert (await storage.sync_index(again=True)).in_step
        assert len(await points(storage, client)) == 1


@pytest.mark.parametrize("calls", range(8))
async def test_cut_off_anywhere_it_catches_up_when_the_server_is_back(
    client: AsyncQdrantClient, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama_index_memory_tiers.storage.marks.PAGE_ROWS", 3)
    rng = random.Random(9)
    index = Failing(QdrantIndex(client))
    async with Storage(vectors=index, clock=lambda: NOW) as storage:
        records = tuple(record(rng, storage) for _ in range(7))
        await change(storage, Changes(add=records))
        index.left = calls
        with pytest.raises(ConnectionError):
            await storage.sync_index()
        assert not (await storage.index_state()).in_step
        index.left = None
        await change(storage, Changes(archive=(records[0].id,)))
        assert (await storage.sync_index()).in_step
        assert {str(point.id) for point in await points(storage, client)} == {point_id(one.id) for one in records[1:]}


async def test_killed_between_the_points_and_the_mark_it_looks_again(client: AsyncQdrantClient) -> None:
    rng = random.Random(10)

    class Killed(BaseException):
        """As a process that ends."""

    def die(name: str) -> None:
        if name == "index.told":
            raise Killed

    async with Storage(vectors=client, clock=lambda: NOW) as storage:
        kept = record(rng, storage)
        await change(storage, Changes(add=(kept,)))
        with failpoints.armed(die), pytest.raises(Killed):
            await storage.sync_index()
        assert (await storage.index_state()).owners == 1
        (space,) = [c.name for c in (await client.get_collections()).collections]
        # What another process wrote late and could not take back.
        late = models.PointStruct(id=5, vector={}, payload={"owner": OWNER, "record": 77})
        await client.upsert(space, [late])
        assert (await storage.sync_index()).in_step
        assert [point.id for point in await points(storage, client)] == [point_id(kept.id)]


async def test_another_embedding_model_moves_the_points_along(client: AsyncQdrantClient) -> None:
    rng = random.Random(11)
    model = HashEmbedding(dims=16)
    async with Storage(vectors=client, clock=lambda: NOW) as storage:
        await change(storage, Changes(add=tuple(record(rng, storage) for _ in range(5))))
        await storage.sync_index()
        await storage.reindex(model)
        assert (await storage.sync_index()).in_step
        query = IndexQuery(text="tea", now=NOW, vector=await model.aget_query_embedding("tea"))
        found = await outside(storage, query, model.model_name)
        alike(found, await inside(storage, query, model.model_name))
        sizes = {len(dense) for point in await points(storage, client) if (dense := dense_of(point))}
        assert sizes == {16}  # the old vectors are gone there as well


# --- without the server ---------------------------------------------------------------------------------------


def remembering(storage: Storage) -> TieredMemory:
    blocks = [VectorMemoryBlock(embed_model=HashEmbedding())]
    return TieredMemory(storage=storage, user_id="ann", session_id="s", memory_blocks=blocks, delivery="inline")


async def told_of_the_parrot(storage: Storage) -> TieredMemory:
    memory = remembering(storage)
    await memory.aput_messages([said("user", "The parrot is called Io."), said("assistant", "Nice.")])
    await memory.aflush()
    return memory


async def test_who_speaks_is_known_without_the_owner_index_and_dropped_with_the_owner(
    client: AsyncQdrantClient,
) -> None:
    async with Storage(vectors=client) as storage:
        memory = remembering(storage)
        finder, model = storage.records.finder, HashEmbedding().model_name
        assert await finder.speakers("u:ann", model) == ()
        await memory.aput_messages(
            [said("user", "The parrot is called Io."), said("assistant", "Nice.")], sent_from="Ann"
        )
        await memory.aflush()
        await storage.sync_index()
        storage.records.drop_cached({"u:ann"})
        assert await finder.speakers("u:ann", model) == ("Ann",)
        assert storage.records.indexes.held({"u:ann"}) == 0
        statements = storage.statements
        assert await finder.speakers("u:ann", model) == ("Ann",)
        assert storage.statements == statements
        await memory.aforget(scope="user")
        assert await finder.speakers("u:ann", model) == ()
        await memory.aclose()


@pytest.mark.parametrize(("record_id", "vector"), [(1, b"\x01\x02\x03"), (3, b"\x01\x02\x03\x04")])
async def test_a_damaged_vector_stops_no_question(client: AsyncQdrantClient, record_id: int, vector: bytes) -> None:
    async with Storage(vectors=client) as storage:
        memory = remembering(storage)
        told = [said("user", "The parrot is called Io."), said("assistant", "Nice."), said("user", "It talks.")]
        await memory.aput_messages(told, sent_from="Ann")
        await memory.aflush()
        await storage.sync_index()
        embeddings = storage.records._t.embeddings

        async def damage(connection: Any) -> None:
            await connection.execute(embeddings.update().where(embeddings.c.record_id == record_id).values(vec=vector))

        await storage.records._database.write(damage)
        await storage.sync_index(again=True)
        storage.records.drop_cached({"u:ann"})
        assert await storage.records.finder.speakers("u:ann", HashEmbedding().model_name) == ("Ann",)
        asked = tuple(HashEmbedding().get_query_embedding("parrot"))
        query = IndexQuery(text="parrot", now=storage.clock(), vector=asked)
        assert len(await outside(storage, query, model=HashEmbedding().model_name, owner="u:ann")) == 3
        assert "The parrot is called Io." in {one.text for one in await memory.arecall("What is Ann's parrot called?")}
        await memory.aclose()


async def test_the_chat_goes_on_while_the_server_is_away(
    client: AsyncQdrantClient, degraded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "_PAUSE_SECONDS", 0.0)
    index = Failing(QdrantIndex(client))
    async with Storage(vectors=index) as storage:
        memory = await told_of_the_parrot(storage)
        await storage.sync_index()
        degraded.clear()
        assert "Io" in (await memory.arecall("parrot"))[0].text
        assert degraded == []
        index.left = 0
        await memory.aput_messages([said("user", "The otter is called Uma."), said("assistant", "Nice.")])
        await memory.aflush()
        assert "Io" in (await memory.arecall("parrot"))[0].text
        assert "Uma" in (await memory.arecall("otter"))[0].text
        assert set(degraded) == {"ConnectionError"}
        state = await storage.index_state()
        assert (state.error, state.in_step) == ("ConnectionError", False)
        assert state.pending == 2
        index.left = None
        degraded.clear()
        assert "Uma" in (await memory.arecall("otter"))[0].text
        assert degraded == []
        assert storage._keeper is not None
        await storage._keeper.settle()
        state = await storage.index_state()
        assert (state.error, state.pending, state.in_step) == (None, 0, True)
        await memory.aclose()


async def test_a_server_that_failed_a_moment_ago_is_not_waited_for(
    client: AsyncQdrantClient, degraded: list[str]
) -> None:
    rng = random.Random(12)
    index = Failing(QdrantIndex(client))
    async with Storage(vectors=index, clock=lambda: NOW) as storage:
        await change(storage, Changes(add=(record(rng, storage),)))
        await storage.sync_index()
        index.left = 0
        for _ in range(3):
            assert await storage.records.search(OWNER, MODEL, IndexQuery(text="tea Ann Bob Cleo", now=NOW)) is not None
        assert degraded == ["ConnectionError"] * 3
        assert index.calls.count("candidates") == 0


async def test_an_index_that_is_far_behind_does_not_answer(
    client: AsyncQdrantClient, degraded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside_module, "MOST_PENDING", 3)
    rng = random.Random(13)
    async with Storage(vectors=client, clock=lambda: NOW) as storage:
        await change(storage, Changes(add=tuple(record(rng, storage) for _ in range(5))))
        query = IndexQuery(text=" ".join(WORDS), now=NOW, vector=vector_of(rng))
        assert len(await storage.records.search(OWNER, MODEL, query)) == 5
        assert degraded == ["behind"]
        assert storage._keeper is not None
        await storage._keeper.settle()
        assert len(await storage.records.search(OWNER, MODEL, query)) == 5
        assert degraded == ["behind"]


# --- forgetting -----------------------------------------------------------------------------------------------


async def test_forgetting_deletes_points_and_proves_it(client: AsyncQdrantClient) -> None:
    async with Storage(vectors=client) as storage:
        memory = await told_of_the_parrot(storage)
        await storage.sync_index()
        assert len(await points(storage, client)) == 2
        receipt = await memory.aforget(scope="user")
        assert receipt.complete
        assert receipt.removed["index points"] == 2
        assert await points(storage, client) == []
        await memory.aclose()


async def test_what_cannot_be_deleted_now_is_pending_and_deleted_later(
    client: AsyncQdrantClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "_PAUSE_SECONDS", 0.0)
    index = Failing(QdrantIndex(client))
    async with Storage(vectors=index) as storage:
        memory = await told_of_the_parrot(storage)
        await storage.sync_index()
        index.left = 0
        receipt = await memory.aforget(scope="user")
        assert receipt.pending == ("index points",)
        assert await memory.arecall("parrot") == []
        index.left = None
        assert await memory.arecall("parrot") == []  # the stale points answer, and the database knows better
        assert (await storage.sync_index()).in_step
        assert await points(storage, client) == []
        await memory.aclose()


async def test_a_process_without_the_index_says_that_points_may_be_left(
    make_storage: MakeStorage, storage_kind: str, client: AsyncQdrantClient
) -> None:
    without, storage = make_storage(storage_kind), make_storage(storage_kind, vectors=client)
    memory = await told_of_the_parrot(without)
    await storage.sync_index()
    assert (await memory.aforget(scope="user")).pending == ("index points",)
    await storage.sync_index()
    assert await points(storage, client) == []
    await without.leave_index()
    assert (await memory.aforget(scope="user")).complete


async def test_what_is_forgotten_on_its_way_does_not_stay(client: AsyncQdrantClient) -> None:
    async with Storage() as storage:
        memory = await told_of_the_parrot(storage)

        class Slow(QdrantIndex):
            async def put(self, space: Space, points: Sequence[Any]) -> None:
                assert (await memory.aforget(scope="user")).pending == ("index points",)
                await super().put(space, points)

        with_index = Storage(storage._address.url.database, vectors=Slow(client))
        await with_index.sync_index()
        assert await points(storage, client) == []
        await with_index.aclose()
        await memory.aclose()


async def test_points_hold_no_text(client: AsyncQdrantClient) -> None:
    async with Storage(vectors=client) as storage:
        memory = await told_of_the_parrot(storage)
        await storage.sync_index()
        (payloads,) = [[point.payload for point in await points(storage, client)]]
        assert "parrot" not in str(payloads)
        await memory.aclose()


# --- arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectors", ["http://localhost:6333", 7, QdrantClient])
def test_what_is_no_client_is_refused(vectors: Any) -> None:
    with pytest.raises(ConfigurationError, match="vectors="):
        Storage(vectors=vectors)


async def test_the_owner_index_answers_when_there_is_no_other(storage: Storage) -> None:
    state = await storage.index_state()
    assert (state.attached, state.in_step) == (False, True)
    assert (await storage.sync_index()).in_step
    assert storage.records.finder.outside is None
    rows = await storage._database.read(lambda connection: connection.execute(select(storage._tables.marks)))
    assert rows.all() == []
