"""Promises of `scoring`."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from llama_index_memory_tiers import scoring

VALUES = hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-5, 5))


def test_bm25_agrees_with_the_formula_by_hand():
    norm = scoring.length_norm(np.array([24.0, 48.0]))
    weights = scoring.idf(10, 2) * scoring.saturate(np.array([1.0, 3.0]), norm)
    idf = math.log(1 + 8.5 / 2.5)
    assert weights[0] == pytest.approx(idf * 1 * 2.2 / (1 + 1.2))
    assert weights[1] == pytest.approx(idf * 3 * 2.2 / (3 + 1.2 * (0.25 + 0.75 * 2)))


def test_a_window_is_as_long_as_the_messages_it_holds():
    assert scoring.length_norm(np.array([72.0]), np.array([3.0])) == pytest.approx(
        scoring.length_norm(np.array([24.0]))
    )


@given(st.integers(1, 10**6), st.data())
@settings(deadline=None)
def test_a_rarer_term_weighs_more_and_none_weighs_less_than_nothing(rows, data):
    found = data.draw(st.integers(0, rows - 1))
    assert scoring.idf(rows, found) > scoring.idf(rows, found + 1) >= 0


@given(VALUES, st.data())
@settings(deadline=None)
def test_min_max_keeps_order_and_stays_between_0_and_1(values, data):
    among = data.draw(hnp.arrays(np.bool_, values.size))
    out = scoring.min_max(values, among)
    assert ((out >= 0) & (out <= 1)).all()
    assert not out[~among].any()
    order = np.argsort(values[among], kind="stable")
    assert (np.diff(out[among][order]) >= 0).all()


def test_a_lone_row_is_as_good_as_can_be():
    assert scoring.min_max(np.array([0.2, 0.9]), np.array([True, False])).tolist() == [1, 0]


def test_of_max_keeps_zero_at_zero():
    assert scoring.of_max(np.array([0.0, 2.0, 4.0, 8.0]), np.array([True, True, True, False])).tolist() == [
        0,
        0.5,
        1,
        0,
    ]
    assert scoring.of_max(np.zeros(3), np.ones(3, bool)).tolist() == [0, 0, 0]


def test_the_common_direction_is_taken_off_as_far_as_rows_tell_it():
    query, total = np.array([1.0, 0.0]), np.array([20.0, 0.0])
    assert scoring.off_centre(query, total, 20).tolist() == [0.5, 0]
    assert scoring.off_centre(query, np.zeros(2), 0).tolist() == [1, 0]


def test_a_session_counts_by_its_three_best_messages():
    scores = np.array([0.9, 0.6, 0.3, 0.2, 0.9, 0.5])
    sessions = np.array([0, 0, 0, 0, 1, -1])
    assert scoring.session_prior(scores, sessions).tolist() == pytest.approx([0.6] * 4 + [0.3, 0])


@given(
    hnp.arrays(np.float64, 40, elements=st.floats(-1, 1)),
    hnp.arrays(np.int64, 40, elements=st.integers(-1, 5)),
    st.integers(1, 50),
)
@settings(deadline=None)
def test_the_session_prior_equals_a_plain_count(scores, sessions, pool):
    floor = sorted(scores, reverse=True)[pool - 1] if pool < 40 else 0
    expected = []
    for session in sessions:
        best = sorted(
            (s for s, at in zip(scores, sessions, strict=True) if at == session and s > 0 and s >= floor), reverse=True
        )
        expected.append(sum(best[:3]) / 3 if session >= 0 else 0)
    assert scoring.session_prior(scores, sessions, pool).tolist() == pytest.approx(expected)


@given(hnp.arrays(np.float64, 30, elements=st.sampled_from([0.0, 0.25, 0.5, 1.0])), st.integers(-1, 35))
@settings(deadline=None)
def test_the_best_come_first_and_ties_by_id(scores, limit):
    ids = np.arange(30)[::-1]
    rows = np.flatnonzero(scores > 0)
    expected = sorted(rows.tolist(), key=lambda row: (-scores[row], ids[row]))[: max(0, limit)]
    assert scoring.best_first(scores, ids, rows, limit).tolist() == expected


def test_a_score_halves_in_69_days_at_one_per_cent_and_the_future_is_now():
    assert scoring.age_decay(69.3, 0.01) == pytest.approx(0.5, abs=1e-3)
    assert scoring.age_decay(-5, 0.01) == 1
    assert scoring.age_decay(1000, 0) == 1
