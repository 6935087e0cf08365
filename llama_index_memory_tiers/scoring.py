"""Arithmetic of recall: how much a record has to do with a question.

The constants were set by hand, as round numbers on broad plateaus, and checked on public and own conversations; none
is fitted. Gains in the comments are recall within 1 000 / 4 000 tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.integer[Any]]
Mask = NDArray[np.bool_]

K1 = 1.2
"""BM25's saturation, the usual value; .9 to 3 made no difference."""
B = 0.75
"""BM25's length normalisation, the usual value; 0 to .75 differ by .01."""
USUAL_LENGTH = 24.0
"""Terms in a usual message with its speaker and day. A constant, so that one record's score does not depend on the
lengths of others, and so that another index (Qdrant) can hold the finished weights."""
WINDOW_BEFORE = (0.8, 0.4)
"""Share of the first and second message before in BM25's term counts. What a message is about stands as often beside
it ("it was great!"); two neighbours on each side gain +.012 / +.008 over one at full weight."""
WINDOW_AFTER = (0.6, 0.3)
"""The same for the messages after: less, as answers follow questions; the difference gains +.005 / 0."""
CENTROID_ROWS = 20.0
"""The common direction of all vectors is taken off a question as far as there are rows to tell it: half at 20 rows."""
RELATED = 0.5
"""Share of a question's word that its related words count, all of them as one; .3 to .8 are alike. +.005 / +.005 with
a static model, +.005 / +.010 without one."""
SESSION_BEST = 3
"""A session counts by its three best messages."""
SITTING_GAP_SECONDS = 6 * 3600.0
"""A silence that ends a sitting: agents keep one session for months, while what belongs together is said together."""
SESSION_POOL = 2_000
"""Sessions are judged by this many best messages, so that the cost does not grow with the owner."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What each leg adds to a score.

    Args:
        dense: Cosine, after min-max. The unit of the others.
        bm25: BM25 over a window, divided by its maximum; beside the dense leg +.155 / +.080, .5 to 1 are alike.
        session: Mean of the session's three best scores; .3 to .6: +.02 / +.01.
        speaker: The question names this speaker and not every speaker; .2 to .4: +.01 / +.01.
        date: The question names the day, month or year on which this was said; +.002, but it decides between
            messages that are otherwise alike.
        answer: The message tells a time or a number, and the question asks for one; .1 to .2: +.005 / 0, on our
            own chats without a model +.025 / 0.
        question: Taken off what only asks: the answer stands elsewhere; .1: +.006 / +.003, .2 less.
    """

    dense: float = 1.0
    bm25: float = 0.7
    session: float = 0.5
    speaker: float = 0.3
    date: float = 0.1
    answer: float = 0.15
    question: float = 0.1


def idf(rows: int, found: int) -> float:
    """Weight of a term, rare ones more; never negative.

    Args:
        rows: Rows of the owner.
        found: How many of them hold the term.

    Returns:
        ln(1 + (N - n + ½) / (n + ½)), as Lucene and Qdrant count it.
    """
    return math.log1p((rows - found + 0.5) / (found + 0.5))


def length_norm(lengths: Floats, share: Floats | float = 1.0) -> Floats:
    """The part of BM25's denominator that depends on length alone.

    Args:
        lengths: Terms per row, or per window, shape (rows,).
        share: How many usual messages a row or window stands for.

    Returns:
        k1 (1 - b + b · length / usual length), shape (rows,). Robertson and Zaragoza, 2009.
    """
    norm: Floats = K1 * (1 - B) + (K1 * B / USUAL_LENGTH) * (lengths / share)
    return norm


def saturate(counts: Floats, norm: Floats) -> Floats:
    """BM25's answer to a term that occurs more often.

    Args:
        counts: Times the term occurs, shape (rows,).
        norm: See `length_norm`, shape (rows,).

    Returns:
        tf (k1 + 1) / (tf + norm), between 0 and k1 + 1, shape (rows,).
    """
    weight: Floats = counts * (K1 + 1) / (counts + norm)
    return weight


def dots(vectors: Floats, vector: Floats) -> Floats:
    """Dot product of each row, on one thread.

    `@` lets BLAS start a thread for a job of 0.2 ms and waits 8 ms for it when all processors are busy; row by row
    takes 0.3 ms for 10 000 rows of 256 and 5.5 ms for 100 000 of 384, where `@` took 7.7 at best.

    Args:
        vectors: Shape (rows, dimensions).
        vector: Shape (dimensions,).

    Returns:
        Shape (rows,).
    """
    if hasattr(np, "vecdot"):
        products: Floats = np.vecdot(vectors, vector)
    else:  # numpy 1.26
        products = np.einsum("ij,j->i", vectors, vector)
    return products


def off_centre(query: Floats, total: Floats, rows: int) -> Floats:
    """A question's vector without what all rows share.

    Static models put every text near one common direction: rows that are near it (small talk) rank too high. With a
    static 256-d model +.003 / +.014. Mu and Viswanath, "All-but-the-top", 2018.

    Args:
        query: The question's vector, shape (dimensions,).
        total: Sum of the rows' unit vectors, shape (dimensions,).
        rows: How many rows.

    Returns:
        Shape (dimensions,).
    """
    moved: Floats = query - total / (rows + CENTROID_ROWS)
    return moved


def min_max(values: Floats, among: Mask, lowest: float = math.inf) -> Floats:
    """Bring values to the range 0 to 1.

    Args:
        values: Shape (rows,).
        among: The rows that count; the others become 0.
        lowest: The lowest value of rows that count and are not at hand.

    Returns:
        Shape (rows,); 1 where all are equal, as being alone is no fault.
    """
    out = np.zeros_like(values)
    if not among.any():
        return out
    low, high = np.min(values, where=among, initial=lowest), np.max(values, where=among, initial=-np.inf)
    if high > low:
        np.divide(values - low, high - low, out=out, where=among)
    else:
        out[among] = 1
    return out


def of_max(values: Floats, among: Mask) -> Floats:
    """Divide by the maximum: BM25's zero means "nothing found" and stays zero.

    Args:
        values: Not negative, shape (rows,).
        among: The rows that count; the others become 0.

    Returns:
        Shape (rows,), 0 to 1.
    """
    out = np.where(among, values, 0)
    high = out.max(initial=0)
    return out / high if high > 0 else out


def session_prior(scores: Floats, sessions: Ints, pool: int = SESSION_POOL) -> Floats:
    """How well each row's session, or the sitting of it, matches.

    Args:
        scores: Scores so far; rows that don't count have 0 or less, shape (rows,).
        sessions: Number of each row's session, 0 and up, or -1 for none, shape (rows,).
        pool: How many of the best rows judge; ties with the last of them count too.

    Returns:
        Mean of the session's three best scores, a missing one counting 0; 0 without a session. Shape (rows,).
    """
    floor = 0.0
    if len(scores) > pool:
        floor = float(np.partition(scores, len(scores) - pool)[len(scores) - pool])
    chosen = np.flatnonzero((scores > 0) & (scores >= floor) & (sessions >= 0))
    prior = np.zeros(int(sessions.max(initial=-1)) + 2, dtype=scores.dtype)
    if chosen.size:
        order = chosen[np.lexsort((-scores[chosen], sessions[chosen]))]
        groups = sessions[order]
        starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
        rank = np.arange(order.size) - np.repeat(starts, np.diff(np.r_[starts, order.size]))
        best = order[rank < SESSION_BEST]
        np.add.at(prior, sessions[best], scores[best] / SESSION_BEST)
    taken: Floats = prior[sessions]  # -1 reads the last place, which stays 0
    return taken


def best_first(scores: Floats, ids: Ints, rows: Ints, limit: int) -> Ints:
    """The best rows in order.

    Args:
        scores: Shape (all rows,).
        ids: What decides ties, smaller first, shape (all rows,).
        rows: Positions to choose from, shape (candidates,).
        limit: At most this many.

    Returns:
        Positions, best first.
    """
    if limit <= 0:
        return rows[:0]
    if rows.size > limit:
        values = scores[rows]
        edge = np.partition(values, rows.size - limit)[rows.size - limit]
        rows = rows[values >= edge]
    order: Ints = rows[np.lexsort((ids[rows], -scores[rows]))][:limit]
    return order


def age_decay(days: float, rate: float) -> float:
    """How much of a score is left after some days.

    Args:
        days: Age; a time in the future counts as now.
        rate: Per day, 0 or more; .01 halves a score in 69.3 days. Not part of the default score, where it cost recall.

    Returns:
        exp(-rate · days), between 0 and 1.
    """
    return math.exp(-rate * max(0.0, days))
