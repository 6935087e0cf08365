"""Segments as columns: what is found by them is what looking at every segment finds, and costs do not grow with them."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from heat_doubles import TOPICS, Clock, block, memory, talk
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event
from sqlalchemy.engine import Engine

from llama_index_memory_tiers import Storage
from llama_index_memory_tiers.blocks.heat.calibration import unit
from llama_index_memory_tiers.blocks.heat.filing import FilingRules, file_pages
from llama_index_memory_tiers.blocks.heat.library import Library
from llama_index_memory_tiers.blocks.heat.pages import Page
from llama_index_memory_tiers.blocks.heat.segments import (
    Probe,
    Segment,
    begun,
    likeness,
    probe_of,
    ranked,
    read_segment,
    segment_id,
    segment_record,
    volume_of,
)
from llama_index_memory_tiers.heat import RAW, Scale
from llama_index_memory_tiers.records import Changes, Record
from llama_index_memory_tiers.storage import parts

NOW = datetime(2026, 3, 2, 9, tzinfo=timezone.utc)
MODEL = "model"

TERMS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 5), max_size=6)
KEYS = st.lists(st.sampled_from("abcdefgh"), max_size=4, unique=True)
VECTOR = st.none() | st.tuples(*[st.integers(-3, 3)] * 3)
SCALES = st.sampled_from([RAW, Scale(0.1, 0.5, 0.6), Scale(1.0, 1.0, 0.6)])
SEGMENTS = st.lists(st.tuples(TERMS, KEYS, VECTOR, st.integers(0, 4), st.booleans()), max_size=10)
PAGES = st.lists(st.tuples(TERMS, KEYS, VECTOR, st.booleans()), min_size=1, max_size=6)


def direction(numbers: Any) -> Any:
    return None if numbers is None else unit(numbers)


def segment(name: str, terms: Mapping[str, int], keys: Sequence[str], vector: Any, pages: int, other: bool) -> Segment:
    total = direction(vector)
    model = "" if total is None else "another" if other else MODEL
    return Segment(
        name, name, NOW, NOW, terms=terms, keys=dict.fromkeys(keys, 1.0), total=total, model=model, pages=pages
    )


def segments_of(drawn: Sequence[Any]) -> list[Segment]:
    return [segment(f"s{number}", *fields) for number, fields in enumerate(drawn)]


def page(name: str, terms: Mapping[str, int], keys: Sequence[str], vector: Any, chain: str) -> Page:
    return Page(name, (), "", terms, tuple(keys), tuple(keys), name, NOW, direction(vector), chain)


def filed_by_looking_at_all(
    pages: Sequence[Page], segments: Sequence[Segment], rules: FilingRules, before: str | None
) -> list[tuple[str, float]]:
    """Filing in the plainest words."""
    state = {one.id: one for one in segments}
    measure = likeness(rules.scale, [volume_of(one, rules.model) for one in segments])
    found = []
    for each in pages:
        best, most = None, 0.0
        for name, one in state.items():
            full = rules.most_pages is not None and one.pages >= rules.most_pages
            score = measure.filing(probe_of(each), volume_of(one, rules.model))
            if not full and score > most:
                best, most = name, score
        if most < rules.threshold:
            best, most = None, 0.0
        if best is None and rules.follow and each.thin and each.chain != each.id and before in state:
            best = before
        joined = (state[best] if best is not None else begun(each, segment_id(each), NOW)).joined(each, rules.model)
        found.append((joined.id, most))
        state[joined.id] = joined
        before = joined.id
    return found


@given(SEGMENTS, PAGES, SCALES, st.sampled_from([0.3, 0.6, 1.0]), st.sampled_from([None, 4]))
def test_filing_by_columns_is_filing_by_looking_at_every_segment(
    drawn: Any, said: Any, scale: Scale, threshold: float, most_pages: int | None
) -> None:
    segments = segments_of(drawn)
    pages = [
        page(f"p{number}", *fields, "p0" if goes_on else f"p{number}") for number, (*fields, goes_on) in enumerate(said)
    ]
    rules = FilingRules(threshold, MODEL, scale, most_pages)
    before = segments[0].id if segments else None
    filings, changed = file_pages(pages, Library(MODEL, segments), rules, NOW, before)
    assert [(one.segment, one.score) for one in filings] == filed_by_looking_at_all(pages, segments, rules, before)
    assert set(changed) == {one.segment for one in filings}


@given(SEGMENTS, TERMS, VECTOR, SCALES, st.booleans(), st.integers(1, 4))
def test_what_a_question_is_about_is_what_looking_at_every_segment_finds(
    drawn: Any, terms: Any, vector: Any, scale: Scale, literal: bool, most: int
) -> None:
    segments = segments_of(drawn)
    asked = Probe(terms, tuple(terms), direction(vector))
    volumes = [volume_of(one, MODEL) for one in segments]
    measure = likeness(scale, volumes, None if literal else asked.terms)
    expected = ranked(asked, volumes, measure, least=0.1, most=most, literal=literal)
    found = Library(MODEL, segments).about(asked, scale, least=0.1, most=most, literal=literal)
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected])


@given(SEGMENTS, SEGMENTS, st.sets(st.integers(0, 9)), TERMS, VECTOR)
def test_a_library_that_followed_the_changes_equals_a_new_one(
    old: Any, new: Any, gone: set[int], terms: Any, vector: Any
) -> None:
    before = Library(MODEL, segments_of(old))
    before.keep_pages({"s0": [], "s1": [], "s9": []})
    changed = [replace(one, id=f"s{number + 3}") for number, one in enumerate(segments_of(new))]
    after = before.with_changed(changed, [f"s{number}" for number in gone])
    plain = Library(MODEL, after.segments.values())
    assert set(after.segments) == ({*before.segments, *(one.id for one in changed)} - {f"s{n}" for n in gone})
    assert set(after.pages) == ({"s0", "s1"} & set(before.segments) & set(after.segments)) | (
        {"s9"} & set(before.segments) - {one.id for one in changed} - {f"s{n}" for n in gone}
    )
    probe = Probe(terms, tuple(terms), direction(vector))
    for literal in (False, True):
        found, expected = (one.about(probe, RAW, least=0.0, most=5, literal=literal) for one in (after, plain))
        assert found == expected


async def cost(storage: Storage, topics: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, list[str]]:
    """Statements, segments and visits read, and plans of the look-ups by id, of filing a page and of a context, once warm."""
    kept = block(short_term_capacity=0)
    chat = memory(storage, kept)
    found = tuple(
        segment_record(segment(f"{topics}/{number}", {f"word{number}": 1}, [f"word{number}"], None, 1, False))
        for number in range(topics)
    )
    await chat.desk("HeatMemory").change(lambda _: Changes(add=found))
    await storage.records.parts.visit("u:ann", [one.id for one in found])
    await talk(chat, *TOPICS["cat"])
    await chat.aflush()
    await chat.aget(input="What does the vet say?")
    read: list[str] = []
    sent: list[tuple[str, Any]] = []

    def counted(record: Record) -> Segment:
        read.append(record.id)
        return read_segment(record)

    def asked(*given: Any) -> None:
        sent.append((given[2], given[3]))

    monkeypatch.setattr("llama_index_memory_tiers.blocks.heat.library.read_segment", counted)
    visits = parts.Visits

    def visited(*given: Any) -> parts.Visits:
        read.append("visits")
        return visits(*given)

    monkeypatch.setattr(parts, "Visits", visited)
    event.listen(Engine, "before_cursor_execute", asked)
    before = storage.statements
    await talk(chat, *TOPICS["cat"])
    await chat.aflush()
    await chat.aget(input="What does the vet say about food?")
    event.remove(Engine, "before_cursor_execute", asked)
    looked_up = [(text, values) for text, values in sent if "uid IN" in text or "parent IN" in text]
    connection = sqlite3.connect(str(storage.address).partition(":///")[2])
    plans = [str(connection.execute(f"EXPLAIN QUERY PLAN {text}", values).fetchall()) for text, values in looked_up]
    connection.close()
    return storage.statements - before, len(read), plans


async def test_filing_and_recalling_cost_the_same_with_three_topics_and_with_three_hundred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = []
    for topics in (3, 300):
        async with Storage(tmp_path / f"{topics}.db", clock=Clock()) as storage:
            statements, read, plans = await cost(storage, topics, monkeypatch)
        costs.append((statements, read))
        assert plans
        # No look-up of a few ids goes through all that the owner has.
        assert not [plan for plan in plans if "records_rev" in plan or "SCAN llama_index_memory_records" in plan]
    assert costs[0] == costs[1]
    assert costs[0][1] <= 3
