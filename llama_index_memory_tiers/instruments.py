"""What events and spans cost and may tell: nobody pays for what nobody listens to."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from uuid import uuid4

from llama_index_instrumentation.dispatcher import Dispatcher, active_instrument_tags
from llama_index_instrumentation.event_handlers import NullEventHandler
from llama_index_instrumentation.span import active_span_id
from llama_index_instrumentation.span_handlers import NullSpanHandler

from llama_index_memory_tiers.events import dispatcher

_NO_ARGUMENTS = inspect.signature(lambda: None).bind()
_acting: ContextVar[tuple[str, str]] = ContextVar("memory_tiers_acting", default=("", ""))
_texts = False


def include_texts(included: bool) -> None:
    """Let `ModelCalled` carry what a model was asked and what it answered; off unless you switch it on.

    Args:
        included: For all events of this process from now on.
    """
    global _texts  # noqa: PLW0603  # one switch for the process, as its handlers are
    _texts = included


def texts_included() -> bool:
    """Whether events may carry texts."""
    return _texts


def listening() -> bool:
    """Whether any handler gets our events."""
    return any(not isinstance(handler, NullEventHandler) for each in _chain() for handler in each.event_handlers)


def watching() -> bool:
    """Whether any handler gets our spans."""
    return any(not isinstance(handler, NullSpanHandler) for each in _chain() for handler in each.span_handlers)


def _chain() -> Iterator[Dispatcher]:
    here: Dispatcher | None = dispatcher
    while here is not None:
        yield here
        here = here.parent if here.propagate and here.parent_name else None


@contextmanager
def span(name: str) -> Iterator[None]:
    """Report a piece of work as a span, without its arguments and results, which are people's texts.

    LlamaIndex's own decorator binds the arguments of every call and hands them on; this costs a glance at the
    handlers when there are none.

    Args:
        name: Begins the span's id, as in `TieredMemory.aget-…`.

    Yields:
        Nothing; what is done inside belongs to the span.
    """
    if not watching():
        yield
        return
    parent, id_ = active_span_id.get(), f"{name}-{uuid4()}"
    token = active_span_id.set(id_)
    dispatcher.span_enter(id_=id_, bound_args=_NO_ARGUMENTS, parent_id=parent, tags=active_instrument_tags.get())
    try:
        yield
    except BaseException as error:
        dispatcher.span_drop(id_=id_, bound_args=_NO_ARGUMENTS, err=error)
        raise
    else:
        dispatcher.span_exit(id_=id_, bound_args=_NO_ARGUMENTS)
    finally:
        active_span_id.reset(token)


@contextmanager
def acting(block: str, session_id: str) -> Iterator[None]:
    """Name the block and session for whose sake models are called inside.

    Args:
        block: Key of the block.
        session_id: Of its batch.

    Yields:
        Nothing.
    """
    token = _acting.set((block, session_id))
    try:
        yield
    finally:
        _acting.reset(token)


def who_acts() -> tuple[str, str]:
    """Block and session that `acting` named, or two empty texts."""
    return _acting.get()
