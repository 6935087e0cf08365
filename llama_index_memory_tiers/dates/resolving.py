"""Work out what relative dates meant when they were said, by rule and not by a model."""

from __future__ import annotations

import re
import unicodedata
from datetime import datetime, timedelta

from llama_index_memory_tiers.dates.reading import DateHint, find_dates
from llama_index_memory_tiers.moments import aware

_WORKED_OUT = re.compile(r"\s*[(（]\d{4}")


def with_dates(text: str, said_at: datetime) -> str:
    """Write behind each relative date which one it was.

    Args:
        text: What was said, for instance `I saw her yesterday`.
        said_at: When, in the speaker's zone; a naive time is UTC.

    Returns:
        The text with dates such as `(2023-05-07)`, `(2023-05)` or `(2023-05-01 to 2023-05-07)`; the same when none is
        relative, or when each has its date already.
    """
    # As it stands, without NFKC: characters of names and quotes stay the same.
    found = [one for one in find_dates(text, aware(said_at)) if one.relative]
    if not found:
        return text
    parts, at = [], 0
    for one in found:
        if not _WORKED_OUT.match(text, one.end):
            parts += [text[at : one.end], f" ({_iso(one.hint)})"]
            at = one.end
    return "".join([*parts, text[at:]]) if parts else text


def begins(words: str, said_at: datetime) -> datetime | None:
    """The moment from which something holds that holds "since …".

    Args:
        words: For instance `last Friday`, `上个月`, `2023-05-08`.
        said_at: When they were said, in the speaker's zone; a naive time is UTC.

    Returns:
        The beginning of that time, in the speaker's zone; the moment of saying when it is that very day; `None` when
        no date can be read.
    """
    said_at = aware(said_at)
    hint = _first(words, said_at)
    if hint is None:
        return None
    return said_at if hint.day is not None and hint.since <= said_at < hint.until else hint.since


def ends(words: str, said_at: datetime) -> datetime | None:
    """The moment until which something holds that holds "until …".

    Args:
        words: See `begins`.
        said_at: See `begins`.

    Returns:
        The end of a day, the beginning of a week, month or year; `None` when no date can be read.
    """
    hint = _first(words, aware(said_at))
    if hint is None:
        return None
    return hint.until if hint.day is not None else hint.since


def _first(words: str, said_at: datetime) -> DateHint | None:
    found = find_dates(unicodedata.normalize("NFKC", words), said_at)
    return found[0].hint if found else None


def _iso(hint: DateHint) -> str:
    if hint.day is not None or hint.month is not None or hint.year is not None:
        day = f"{hint.since:%Y-%m-%d}"
        return day if hint.day is not None else day[:7] if hint.month is not None else day[:4]
    last = hint.until - timedelta(days=1)
    return f"{hint.since:%Y-%m-%d} to {last:%Y-%m-%d}"
