"""Promises of the owner index."""

import math
import random
import threading
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama_index_memory_tiers import scoring
from llama_index_memory_tiers.dates import read_dates
from llama_index_memory_tiers.errors import EmbeddingError
from llama_index_memory_tiers.related import related_terms
from llama_index_memory_tiers.storage import index as module
from llama_index_memory_tiers.storage.index import (
    IndexCache,
    IndexQuery,
    IndexRow,
    OwnerIndex,
    encode_terms,
    encode_vector,
    postings,
    table,
)
from llama_index_memory_tiers.text import QUESTION, analyse, message_terms
from llama_index_memory_tiers.wanted import wanted_by

NOW = datetime(2023, 6, 14, 12, tzinfo=timezone.utc)
# Seeds, not `st.randoms`: that one tries normal numbers no generator would give, and shrinks for minutes.
SEEDS = st.integers(0, 2**32)
WORDS = ["tea", "coffee", "dog", "cat", "paris", "tokyo", "piano", "bike", "猫", "茶"]


def make(id_, text="tea", *, rev=1, vector=None, seq=None, sid=1, **fields):
    terms, counts = encode_terms(fields.pop("terms", None) or message_terms(text))
    row = IndexRow(
        id=id_, rev=rev, kind="message", block="vector", live=True, said_at=NOW.timestamp(), expires_at=None,
        sid=sid, seq=id_ if seq is None and sid is not None else seq, speaker="", tokens=len(text),
        vector=None if vector is None else encode_vector(vector), terms=terms, counts=counts,
    )  # fmt: skip
    return row._replace(**fields)


def ask(index, text="tea", **fields):
    return index.search(IndexQuery(text=text, now=NOW, **fields))


def ids(hits):
    return [hit.id for hit in hits]


def filled(*rows, **settings_):
    index = OwnerIndex(**settings_)
    index.update(rows)
    return index


# ---- a plain-Python twin


def line_of(row, rows):
    """The messages of the row's session, kind and block, in order."""
    return sorted(
        (r for r in rows if (r.sid, r.kind, r.block) == (row.sid, row.kind, row.block) and r.seq is not None),
        key=lambda r: (r.seq, r.id),
    )


def sitting(row, rows):
    """The first message since a silence of more than six hours; None without a place."""
    if row.sid is None or row.seq is None:
        return None
    first, last = None, None
    for r in line_of(row, rows):
        silent = last is not None and None not in {r.said_at, last} and abs(r.said_at - last) > 6 * 3600
        first = r.id if first is None or silent else first
        last = r.said_at
        if r.id == row.id:
            return first
    return None


def neighbours(row, rows):
    """Two on each side, in the row's session, kind and block, with their shares."""
    if row.sid is None or row.seq is None:
        return []
    line = line_of(row, rows)
    at = [r.id for r in line].index(row.id)
    shares = dict(zip((-1, -2, 1, 2), (*scoring.WINDOW_BEFORE, *scoring.WINDOW_AFTER), strict=True))
    return [(line[at + step], share) for step, share in shares.items() if 0 <= at + step < len(line)]


def counts_of(row):
    return dict(zip(np.frombuffer(row.terms, "<u4").tolist(), np.frombuffer(row.counts, "<u2").tolist(), strict=True))


def plain_bm25(query, rows, visible):
    out = dict.fromkeys((r.id for r in rows), 0.0)
    terms = analyse(query.text)
    looked_up = [((term,), 1.0) for term in terms] + [(group, scoring.RELATED) for group in related_terms(terms)]
    for group, worth in looked_up:
        numbers = [module.term_number(term) for term in group]
        found = sum(any(number in counts_of(r) for number in numbers) for r in visible)
        if not found:
            continue
        idf = worth * math.log(1 + (len(visible) - found + 0.5) / (found + 0.5))
        for row in rows:
            count, length, share = (
                float(sum(counts_of(row).get(number, 0) for number in numbers)) * (row in visible),
                sum(counts_of(row).values()),
                1.0,
            )
            for other, weight in neighbours(row, rows):
                count += weight * sum(counts_of(other).get(number, 0) for number in numbers) * (other in visible)
                length += weight * sum(counts_of(other).values())
                share += weight
            norm = scoring.K1 * (1 - scoring.B + scoring.B * length / share / scoring.USUAL_LENGTH)
            out[row.id] += idf * count * (scoring.K1 + 1) / (count + norm)
    return out


def passes(row, query):
    time = row.said_at
    return (
        (query.kinds is None or row.kind in query.kinds)
        and (query.blocks is None or row.block in query.blocks)
        and (query.since is None or (time is not None and time >= query.since.timestamp()))
        and (query.until is None or (time is not None and time < query.until.timestamp()))
        and (query.sessions is None or row.sid in query.sessions)
        and (row.sid, row.seq) not in query.exclude
    )


def plain_search(query, states):
    """Scores by id, of every hit."""
    newest = {}
    for row in states:
        if row.id not in newest or newest[row.id].rev < row.rev:
            newest[row.id] = row
    rows = [row for row in newest.values() if row.live]
    visible = [r for r in rows if r.expires_at is None or r.expires_at > query.now.timestamp()]
    among = [r for r in visible if passes(r, query)]
    w = scoring.Weights()
    bm25 = plain_bm25(query, rows, visible)
    top = max([bm25[r.id] for r in among], default=0) or 1
    vectors = {r.id: np.frombuffer(r.vector, "<f2").astype(float) for r in rows if r.vector}
    cosine, evidence = {}, {r.id for r in among if bm25[r.id] > 0}
    if query.vector is not None and vectors:
        q = np.array(query.vector) / np.linalg.norm(query.vector) - sum(vectors.values()) / (len(vectors) + 20)
        cosine = {r.id: float(vectors[r.id] @ q) for r in among if r.id in vectors}
        evidence |= set(cosine)
    low, high = min(cosine.values(), default=0), max(cosine.values(), default=0)
    speakers = {r.speaker for r in visible if r.speaker}
    named = {s for s in speakers if s.casefold() in query.text.casefold().split()}
    spans = [span for hint in read_dates(query.text, query.now) for span in hint.spans(2000, 2030)]
    score = {}
    for r in among:
        s = w.bm25 * bm25[r.id] / top
        if r.id in cosine:
            s += w.dense * ((cosine[r.id] - low) / (high - low) if high > low else 1)
        s += w.speaker * (r.speaker in named and len(named) < len(speakers))
        s += w.date * any(r.said_at is not None and a.timestamp() <= r.said_at < b.timestamp() for a, b in spans)
        s -= w.question * (module.term_number(QUESTION) in counts_of(r))
        s += w.answer * bool({*map(module.term_number, wanted_by(query.text))} & {*counts_of(r)})
        score[r.id] = s
    best = {}
    together = {r.id: sitting(r, rows) for r in among}
    for r in among:
        if r.id in evidence and together[r.id] is not None and score[r.id] > 0:
            best.setdefault(together[r.id], []).append(score[r.id])
    prior = {first: sum(sorted(found, reverse=True)[:3]) / 3 for first, found in best.items()}
    return {
        r.id: score[r.id] + w.session * prior.get(together[r.id], 0)
        for r in among
        if evidence and (r.id in evidence or prior.get(together[r.id], 0) > 0)
    }


def random_rows(rng, count, *, vectors):
    rows = []
    for id_ in range(1, count + 1):
        text = " ".join(rng.choices([*WORDS, "two", "hours"], k=rng.randint(1, 6))) + rng.choice(["", "", "?"])
        rows.append(
            make(
                id_, text, rev=id_, sid=rng.choice([None, 1, 2, 3]), seq=rng.choice([None, *[id_] * 9]),
                kind=rng.choice(["message", "message", "fact"]), block=rng.choice(["a", "b"]),
                speaker=rng.choice(["", "maria", "john"]),
                said_at=rng.choice([None, *[(NOW - timedelta(days=rng.randint(0, 400))).timestamp()] * 4]),
                expires_at=rng.choice([None, None, None, NOW.timestamp(), NOW.timestamp() + 1]),
                vector=[rng.gauss(0, 1) + 1 for _ in range(4)] if vectors and rng.random() < 0.9 else None,
            )
        )  # fmt: skip
    later = [
        r._replace(rev=1000 + r.id, live=rng.random() < 0.5, terms=rows[0].terms, counts=rows[0].counts)
        for r in rng.sample(rows, count // 3)
    ]
    return rows + later


def random_query(rng, *, vectors):
    return IndexQuery(
        text=" ".join(
            rng.choices(
                [*WORDS, "pet", "drink", "maria", "john", "in may", "yesterday", "the", "how long"], k=rng.randint(1, 5)
            )
        ),
        now=NOW,
        vector=[rng.gauss(0, 1) for _ in range(4)] if vectors else None,
        kinds=rng.choice([None, frozenset({"message"}), frozenset({"fact", "unheard"})]),
        blocks=rng.choice([None, frozenset({"a"}), frozenset()]) if rng.random() < 0.5 else None,
        since=rng.choice([None, None, NOW - timedelta(days=200)]),
        until=rng.choice([None, None, NOW - timedelta(days=20)]),
        sessions=rng.choice([None, None, frozenset({1, 2, 99})]),
        exclude=frozenset((rng.choice([1, 2, 3, 99]), rng.randint(1, 40)) for _ in range(rng.choice([0, 10]))),
        limit=1000,
    )


@given(SEEDS, st.booleans())
@settings(deadline=None, max_examples=60)
def test_search_equals_plain_python_whatever_the_data_filters_and_order_of_updates(seed, vectors):
    rng = random.Random(seed)
    states = random_rows(rng, rng.randint(1, 40), vectors=vectors)
    index = OwnerIndex(dimensions=4)
    shuffled = rng.sample(states, len(states))
    while shuffled:
        cut = rng.randint(1, len(shuffled))
        index.update(shuffled[:cut])
        index.update(rng.sample(states, min(2, len(states))) if rng.random() < 0.2 else [])
        shuffled = shuffled[cut:]
    index.update(states)
    for _ in range(4):
        query = random_query(rng, vectors=vectors)
        hits = index.search(query)
        expected = plain_search(query, states)
        assert {hit.id: hit.score for hit in hits} == pytest.approx(expected, abs=2e-4)
        assert hits == sorted(hits, key=lambda hit: (-hit.score, hit.id))
        assert all(sum(hit.legs.values()) == pytest.approx(hit.score, abs=1e-5) for hit in hits)


@pytest.mark.parametrize("share", [1, 2, 3, 4, 5, 10])
def test_a_word_weighs_the_same_however_many_records_hold_it(share):
    """Words of many records are counted another way than those of few."""
    rows = [make(n, "tea cup" if n % share == 0 else "cup", seq=n, live=n % 7 > 0) for n in range(60)]
    query = IndexQuery(text="tea", now=NOW, limit=100)
    found = {hit.id: hit.score for hit in filled(*rows).search(query)}
    assert found == pytest.approx(plain_search(query, rows), abs=1e-5)


@given(SEEDS)
@settings(deadline=None, max_examples=25)
def test_a_limit_gives_the_beginning_of_the_whole_list(seed):
    rng = random.Random(seed)
    index = OwnerIndex(dimensions=4)
    index.update(random_rows(rng, 60, vectors=True))
    query = random_query(rng, vectors=True)
    whole = index.search(query)
    for limit in (-1, 0, 1, 7):
        found = index.search(replace(query, limit=limit))
        assert [(hit.id, hit.score) for hit in found] == [(hit.id, hit.score) for hit in whole[: max(0, limit)]]


def test_sorting_merging_and_compaction_change_no_answer(monkeypatch):
    rng = random.Random(5)
    states = random_rows(rng, 60, vectors=True)
    monkeypatch.setattr(postings, "_DELTA_FLOOR", 10)
    monkeypatch.setattr(table, "_GARBAGE_FLOOR", 3)
    index = OwnerIndex(dimensions=4)
    for rev in range(4):
        for row in states:
            index.update([row._replace(rev=row.rev + 5000 * rev)])
    assert index._rows.size < 4 * len(index)
    for _ in range(20):
        query = random_query(rng, vectors=True)
        found = {hit.id: hit.score for hit in index.search(query)}
        assert found == pytest.approx(plain_search(query, states), abs=2e-4)


# ---- single promises


def test_without_vectors_a_record_is_found_by_its_words_alone():
    index = filled(make(1, "green tea", sid=None), make(2, "black coffee", sid=None))
    (hit,) = ask(index, "which tea?")
    assert (hit.id, hit.similarity, set(hit.legs)) == (1, None, {"bm25"})


def test_with_vectors_a_record_is_found_without_a_common_word():
    index = filled(make(1, "green tea", sid=None, vector=[1, 0]), make(2, "black coffee", sid=None, vector=[0, 1]))
    hits = ask(index, "infusion", vector=[3, 0.1])
    assert ids(hits) == [1, 2]
    assert hits[0].similarity == pytest.approx(0.999, abs=2e-3)


def test_a_single_record_is_found_by_its_vector():
    assert ids(ask(filled(make(1, "tea", vector=[1, 0])), "infusion", vector=[0.9, 0.1])) == [1]


def test_the_answer_beside_the_matching_question_is_found_and_comes_first():
    index = filled(make(1, "and where did you go on holiday?"), make(2, "to Lisbon"), make(3, "dog", sid=2))
    assert ids(ask(index, "holiday")) == [2, 1]


def test_neighbours_may_be_apart_when_messages_between_are_no_records():
    index = filled(make(1, "holiday", seq=1), make(2, "Lisbon", seq=9))
    assert {hit.id: "bm25" in hit.legs for hit in ask(index, "holiday")} == {1: True, 2: True}


def test_the_named_speaker_comes_first_unless_all_are_named():
    rows = [make(i, "tea", sid=None, speaker=name) for i, name in enumerate(["John", "Maria", "John"], 1)]
    assert ids(ask(filled(*rows), "Maria's tea"))[0] == 2
    assert all("speaker" not in hit.legs for hit in ask(filled(*rows), "tea of Maria and John"))


def test_the_named_day_comes_first():
    may = datetime(2022, 5, 8, 9, tzinfo=timezone.utc).timestamp()
    index = filled(make(1, sid=None), make(2, sid=None, said_at=may), make(3, sid=None, said_at=None))
    for question in ("tea in May", "tea on 2022-05-08", "tea 去年5月8日"):
        assert ids(ask(index, question)) == [2, 1, 3], question


def test_a_general_question_finds_a_particular_answer_and_its_own_words_first():
    index = filled(make(1, "the weather is fine", sid=1), make(2, "we have a cat", sid=2), make(3, "a pet", sid=3))
    assert ids(ask(index, "which pets?")) == [3, 2]


def test_what_only_asks_comes_after_what_says():
    index = filled(make(1, "tea?", sid=None), make(2, "tea", sid=None))
    assert ids(ask(index)) == [2, 1]


def test_an_expired_record_is_invisible_from_that_moment():
    index = filled(make(1, expires_at=NOW.timestamp() + 1))
    assert ids(ask(index)) == [1]
    assert index.search(IndexQuery(text="tea", now=NOW + timedelta(seconds=1))) == []


def test_a_naive_now_is_utc():
    index = filled(make(1, expires_at=NOW.timestamp() + 1))
    assert ids(index.search(IndexQuery(text="tea", now=NOW.replace(tzinfo=None)))) == [1]


def test_a_changed_record_is_found_by_its_new_text_only():
    index = filled(make(1, "tea", sid=None), make(2, "dog", sid=None))
    index.update([make(1, "coffee", rev=2, sid=None)])
    assert ids(ask(index, "tea")) == []
    assert ids(ask(index, "coffee")) == [1]
    assert len(index) == 2


def test_a_removed_record_does_not_come_back_with_a_late_old_state():
    index = filled(make(1, rev=2, live=False))
    index.update([make(1, rev=1)])
    assert ask(index) == []
    assert len(index) == 0


@pytest.mark.parametrize("text", ["", "   ", "what is it?", "🙂", "？！", "\ud800"])
@pytest.mark.parametrize("vector", [None, [1.0, 0.0]])
def test_a_question_that_says_nothing_finds_nothing(text, vector):
    index = filled(make(1, "tea", vector=[1, 0]))
    spoken = vector is not None and "what" in text  # its embedding still says something
    assert ids(ask(index, text, vector=vector)) == ([1] if spoken else [])


def test_an_empty_index_finds_nothing():
    assert ask(OwnerIndex(), vector=[1, 2]) == []


def test_a_question_of_ten_thousand_words_is_answered_by_its_rare_words():
    names = ["".join(chr(97 + int(digit)) for digit in str(1000 + i)) for i in range(400)]
    index = filled(*[make(i, f"common {names[i]}", sid=None) for i in range(1, 100)])
    text = " ".join(["common", *names[100:], names[7]]) + " filler" * 10_000
    assert ids(ask(index, text, limit=1)) == [7]


def test_a_question_of_another_size_is_refused_with_both_sizes():
    with pytest.raises(EmbeddingError, match=r"3 dimensions.*2"):
        ask(filled(make(1, vector=[1, 0])), vector=[1, 2, 3])


@pytest.mark.parametrize("vector", [[], [0, 0], [math.nan, 1], [math.inf, 1], [[1, 2]]])
def test_what_is_no_vector_is_refused(vector):
    with pytest.raises(EmbeddingError):
        encode_vector(vector)
    with pytest.raises(EmbeddingError):
        ask(filled(make(1, vector=[1, 0])), vector=vector)


@pytest.mark.parametrize("scale", [1e-300, 1, 1e300])
def test_a_vector_is_stored_with_unit_length_whatever_its_size(scale):
    stored = np.frombuffer(encode_vector([3 * scale, 4 * scale]), "<f2")
    assert stored.tolist() == pytest.approx([0.6, 0.8], abs=1e-3)


def test_a_stored_vector_of_another_size_leaves_the_record_to_bm25_and_is_counted():
    index = filled(make(1, vector=[1, 0]), make(2, vector=[1, 0, 0]), dimensions=2)
    hits = {hit.id: hit for hit in ask(index, vector=[1, 0])}
    assert hits[2].similarity is None
    assert index.refused_vectors == 1


def test_terms_are_stored_sorted_and_bounded_and_the_same_in_every_process():
    terms, counts = encode_terms({"tea": 2, "dog": 100_000, "none": 0})
    assert np.frombuffer(terms, "<u4").tolist() == [2167159165, 2391201714]
    assert np.frombuffer(counts, "<u2").tolist() == [65535, 2]
    assert encode_terms({}) == (b"", b"")


def test_memory_is_measured():
    index = OwnerIndex()
    empty = index.nbytes
    index.update([make(i, vector=[1] * 256) for i in range(1000)])
    ask(index)
    assert index.nbytes - empty > 1000 * 256 * 4


def test_one_new_record_does_not_sort_the_old_ones_again(monkeypatch):
    index = filled(*[make(i, f"word{i} tea") for i in range(3000)])
    merges = []
    monkeypatch.setattr(index._rows.postings, "_merge", lambda *new: merges.append(new))
    for i in range(3000, 3200):
        index.update([make(i, f"word{i} tea")])
        assert ids(ask(index, f"word{i}", limit=1)) == [i]
    assert merges == []


def test_updates_and_searches_may_come_from_several_threads():
    index, failed = filled(make(1, vector=[1, 0])), []

    def work(start):
        try:
            for i in range(start, start + 200):
                index.update([make(i, vector=[1, i])])
                assert ask(index, vector=[1, 0])
        except Exception as error:  # noqa: BLE001 # threads lose their errors
            failed.append(error)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(index) == 601


# ---- packs


@given(SEEDS)
@settings(max_examples=30)
def test_an_unpacked_index_answers_as_the_packed_one_and_goes_on_learning(seed):
    rng = random.Random(seed)
    states = random_rows(rng, 50, vectors=rng.random() < 0.7)
    half = rng.randrange(len(states))
    index = OwnerIndex()
    for row in states[:half]:
        index.update([row])
    index.rev, index.epoch = 7, 3
    twin = OwnerIndex.unpacked(*index.packed())
    assert (twin.rev, twin.epoch, len(twin), twin.dimensions) == (7, 3, len(index), index.dimensions)
    for grown in (False, True):
        if grown:
            index.update(states[half:])
            twin.update(states[half:])
        for _ in range(5):
            query = random_query(rng, vectors=index.dimensions is not None)
            ours, theirs = ({hit.id: hit.score for hit in each.search(query)} for each in (index, twin))
            # Sums of vectors are added up in another order, so that equal scores may differ in the last digits.
            assert theirs == pytest.approx(ours, abs=1e-4)


@given(SEEDS)
@settings(max_examples=50)
def test_damaged_packs_are_refused(seed):
    rng = random.Random(seed)
    _, _, body = filled(*[make(i, vector=[1, i]) for i in range(5)]).packed()
    at = rng.randrange(len(body))
    flipped = body[:at] + bytes([body[at] ^ (1 << rng.randrange(8))]) + body[at + 1 :]
    for damaged in (flipped, body[:at], body + b"x"):
        with pytest.raises(ValueError, match=r"^$|JSON|codec"):
            OwnerIndex.unpacked(0, 0, damaged)


# ---- cache


def test_the_cache_drops_what_was_used_longest_ago():
    size = filled(make(1)).nbytes
    cache = IndexCache(max_bytes=int(2.5 * size))
    for key in "ab":
        cache.put(key, filled(make(1)))
    assert cache.get("a") is not None
    cache.put("c", filled(make(1)))
    assert [cache.get(key) is not None for key in "abc"] == [True, False, True]


def test_the_cache_keeps_the_newest_even_when_it_alone_is_too_large():
    cache = IndexCache(max_bytes=1)
    cache.put("a", filled(make(1)))
    cache.put("b", filled(make(1)))
    assert (cache.get("a"), len(cache)) == (None, 1)


def test_the_cache_measures_an_index_again_when_it_is_put_again():
    first, second = filled(make(1)), filled(make(1))
    cache = IndexCache(max_bytes=first.nbytes + second.nbytes)
    cache.put("a", first)
    cache.put("b", second)
    assert len(cache) == 2
    second.update([make(i, "tea " * 20) for i in range(2, 50)])
    cache.put("b", second)
    assert (cache.get("a"), cache.get("b"), len(cache)) == (None, second, 1)


def test_the_cache_measures_only_the_index_that_is_put(monkeypatch):
    indexes = [filled(make(1)) for _ in range(20)]
    size, measured = indexes[0].nbytes, []
    monkeypatch.setattr(OwnerIndex, "nbytes", property(lambda index: measured.append(index) or size))
    cache = IndexCache(max_bytes=10 * size)
    for number, index in enumerate(indexes):
        cache.put(number, index)
    cache.put(19, indexes[19])
    assert len(measured) == 21
    assert [number for number in range(20) if cache.get(number) is not None] == list(range(10, 20))
