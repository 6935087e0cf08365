"""Moments: aware, within what every zone can show, and as a count of microseconds."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from llama_index_memory_tiers.errors import InvalidMessageError

_FIRST_YEAR, _LAST_YEAR = 2, 9998  # a day away from what datetime can hold, for the zones
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)


def aware(time: datetime) -> datetime:
    """Make a time aware; a naive one is read as UTC.

    Args:
        time: Any datetime.

    Returns:
        The same moment with its zone; the zone that was given is kept.
    """
    return time if time.tzinfo is not None else time.replace(tzinfo=timezone.utc)


def checked_time(name: str, time: datetime) -> datetime:
    """Refuse a time that not every zone can show.

    Args:
        name: The argument's name, for the error.
        time: What was given; a naive one is read as UTC.

    Returns:
        The same moment, aware.

    Raises:
        InvalidMessageError: It is no datetime, or lies outside the years 2 to 9998.
    """
    if not isinstance(time, datetime) or not _FIRST_YEAR <= time.year <= _LAST_YEAR:
        raise InvalidMessageError(
            f"{name}={time!r:.100} was given.",
            allowed=f"{name} is a datetime in the years {_FIRST_YEAR} to {_LAST_YEAR}; a naive one means UTC.",
            remedy="Correct it; nothing was stored.",
        )
    return aware(time)


def to_microseconds(time: datetime) -> int:
    """Microseconds since 1970 in UTC; naive times are read as UTC."""
    return (aware(time) - _EPOCH) // _MICROSECOND


def from_microseconds(count: int, utc_offset_seconds: int = 0) -> datetime:
    """An aware datetime in the given zone."""
    moment = _EPOCH + count * _MICROSECOND  # a quarter of the time of timedelta(microseconds=count)
    if not utc_offset_seconds:
        return moment
    return moment.astimezone(timezone(timedelta(seconds=utc_offset_seconds)))


_FIRST, _LAST = (to_microseconds(datetime(year, 1, 1, tzinfo=timezone.utc)) for year in (_FIRST_YEAR, _LAST_YEAR + 1))


def check_moment(count: int, utc_offset_seconds: int = 0) -> None:
    """Raise what `from_microseconds` would, in a fifth of its time: ValueError, TypeError or OverflowError."""
    if utc_offset_seconds or not _FIRST <= count <= _LAST:
        from_microseconds(count, utc_offset_seconds)
