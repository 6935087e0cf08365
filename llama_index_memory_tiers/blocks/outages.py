"""Whether a failure comes from the way to a model or store, or from what was sent there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

# What HTTP clients answer when nothing is wrong with the content: no key, no money and no such model among them.
_OUTAGE_STATUS = frozenset({401, 402, 403, 404, 408, 409, 425, 429, 500, 502, 503, 504, 529})
_OUTAGE_NAMES = ("timeout", "connect", "ratelimit", "unavailable", "overloaded", "network")


def is_outage(error: BaseException) -> bool:
    """Whether a failure comes from the way to a model or store, not from the content.

    Args:
        error: What was raised; its causes are looked at as well.

    Returns:
        True for connections, time-outs and rate limits: the block waits. False: the batch is at fault.
    """
    return any(_is_outage(link) for link in _causes(error))


def _is_outage(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError | asyncio.TimeoutError):
        return True
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    name = type(error).__name__.lower()
    return status in _OUTAGE_STATUS or any(sign in name for sign in _OUTAGE_NAMES)


def _causes(error: BaseException) -> Iterable[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__
