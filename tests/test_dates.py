"""Relative dates are worked out from when and where they were said."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_index_memory_tiers.dates import begins, ends, with_dates

TOKYO = timezone(timedelta(hours=9))
SAID = datetime(2023, 5, 8, 0, 30, tzinfo=TOKYO)  # a Monday there, still Sunday in London


@pytest.mark.parametrize(
    ("words", "day"),
    [
        ("yesterday", "2023-05-07"), ("last Friday", "2023-05-05"), ("last night", "2023-05-07"), ("two days ago", "2023-05-06"),
        ("the day after tomorrow", "2023-05-10"), ("in three days", "2023-05-11"), ("next Monday", "2023-05-15"),
        ("last month", "2023-04-01"), ("next month", "2023-06-01"), ("last year", "2022-01-01"), ("2021-02-03", "2021-02-03"),
        ("昨天", "2023-05-07"), ("昨晚", "2023-05-07"), ("上周五", "2023-05-05"), ("上上周", "2023-04-24"), ("下个月", "2023-06-01"),
        ("三天后", "2023-05-11"), ("大后天", "2023-05-11"), ("去年", "2022-01-01"), ("上个月", "2023-04-01"), ("两周前", "2023-04-24"),
    ],
)  # fmt: skip
def test_words_begin_on_the_day_that_they_meant_in_the_speakers_zone(words: str, day: str) -> None:
    found = begins(words, SAID)
    assert found is not None
    assert (found.isoformat()[:10], found.utcoffset(), found.hour) == (day, timedelta(hours=9), 0)


def test_today_begins_when_it_was_said_and_a_day_ends_with_its_end() -> None:
    assert begins("today", SAID) == SAID
    assert ends("on Friday", SAID) == datetime(2023, 5, 6, tzinfo=TOKYO)
    assert ends("next month", SAID) == datetime(2023, 6, 1, tzinfo=TOKYO)


def test_what_is_no_date_has_no_moment() -> None:
    assert begins("a while", SAID) is None
    assert ends("", SAID) is None


def test_a_week_is_written_with_its_first_and_last_day() -> None:
    assert with_dates("We met last week.", SAID) == "We met last week (2023-05-01 to 2023-05-07)."


WORDS = st.lists(st.sampled_from(["yesterday", "昨天", "，", "(", "last week", "ﬁ", "2023"])).map(" ".join)


@given(text=WORDS)
def test_dates_are_written_once(text: str) -> None:
    once = with_dates(text, SAID)
    assert with_dates(once, SAID) == once


@given(text=WORDS | st.text(max_size=80))
def test_every_character_that_was_said_stays_in_its_order(text: str) -> None:
    rest = iter(with_dates(text, SAID))
    assert all(character in rest for character in text)
