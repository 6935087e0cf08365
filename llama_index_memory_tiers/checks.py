"""Arguments are of the kind that their annotations name; otherwise an error says so before anything is done."""

from __future__ import annotations

import inspect
import sys
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache, wraps
from os import PathLike
from typing import (
    Any,
    BinaryIO,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from llama_index_memory_tiers.errors import ConfigurationError

P = ParamSpec("P")
T = TypeVar("T")

_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    type(None): "None",
    type: "a class",
    PathLike: "a path",
    BinaryIO: "a stream of bytes",
}
_LARGEST = 2**63 - 1  # of the whole numbers that a database holds
_SHOWN = 100  # characters of a value in an error


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Refuse arguments of another kind than the annotations of a function name.

    Python's own errors would come later, from inside, and name neither the argument nor the way out.

    Args:
        function: A function or method, async or not.

    Returns:
        The same with its arguments checked.
    """
    signature = inspect.signature(function)

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return  # one too many, or missing: the call itself says it better, with the function's name
        hints = _hints(function)
        for name, value in given.items():
            kind = signature.parameters[name].kind
            if name not in hints or kind is inspect.Parameter.VAR_KEYWORD:
                continue
            for one in value if kind is inspect.Parameter.VAR_POSITIONAL else (value,):
                check_kind(name, one, hints[name])

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
            check(args, kwargs)
            return await function(*args, **kwargs)

        return awaited  # type: ignore[return-value]  # a coroutine function again

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        check(args, kwargs)
        return function(*args, **kwargs)

    return called


def check_fields(value: Any) -> None:
    """Refuse a dataclass of which a field is of another kind than its annotation names.

    Args:
        value: The instance; call it in `__post_init__`.

    Raises:
        ConfigurationError: Names the field and its value.
    """
    hints = _hints(type(value))  # type: ignore[arg-type]  # a class can be hashed
    for one in fields(value):
        check_kind(one.name, getattr(value, one.name), hints[one.name])


def check_kind(name: str, value: Any, hint: Any) -> None:
    """Refuse a value of another kind.

    Args:
        name: Of the argument.
        value: What was given.
        hint: What it is annotated with.

    Raises:
        ConfigurationError: Names the argument and its value.
    """
    if not _fits(value, hint):
        raise ConfigurationError(
            f"{name}={value!r:.{_SHOWN}} was given.",
            allowed=f"{name} is {_words(hint)}.",
            remedy=f"Correct {name}; nothing was stored.",
        )


def check_whole(name: str, value: Any, *, least: int) -> int:
    """Refuse what is no whole number from a least one.

    Args:
        name: Of the argument.
        value: What was given.
        least: The smallest that is allowed.

    Returns:
        The number.

    Raises:
        ConfigurationError: Names the argument and its value.
    """
    if not _fits(value, int) or value < least:
        raise ConfigurationError(
            f"{name}={value!r:.{_SHOWN}} was given.",
            allowed=f"{name} is a whole number from {least}.",
            remedy=f"Pass such a number, or leave {name} out.",
        )
    return int(value)


def check_number(name: str, value: Any, *, least: float, most: float) -> float:
    """Refuse what is no number within bounds.

    Args:
        name: Of the argument.
        value: What was given.
        least: The smallest that is allowed.
        most: The largest.

    Returns:
        The number.

    Raises:
        ConfigurationError: Names the argument and its value.
    """
    if not _fits(value, float) or not least <= value <= most:
        raise ConfigurationError(
            f"{name}={value!r:.{_SHOWN}} was given.",
            allowed=f"{name} is a number from {least:g} to {most:g}.",
            remedy=f"Pass such a number, or leave {name} out.",
        )
    return float(value)


def repeated(names: Iterable[str]) -> list[str]:
    """Names that stand more than once, in order."""
    return sorted(name for name, times in Counter(names).items() if times > 1)


@cache
def _hints(function: Any) -> dict[str, Any]:
    """Annotations as types; read at the first call, when all modules are loaded."""
    return {name: hint for name, hint in get_type_hints(function).items() if name != "return"}


@runtime_checkable
class _Read(Protocol):
    def read(self, size: int = -1, /) -> object: ...


@runtime_checkable
class _Written(Protocol):
    def write(self, data: bytes, /) -> object: ...


_ALIKE = {BinaryIO: _Read | _Written}
"""Annotations that no class of the standard library derives from, and what behaves like them."""


def _fits(value: Any, hint: Any) -> bool:
    hint = _ALIKE.get(hint, hint)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in get_args(hint))
    if inspect.isclass(origin) and issubclass(origin, Iterable):
        return _holds(value, origin, get_args(hint))
    if hint in (int, float):
        number = isinstance(value, (int, hint)) and not isinstance(value, bool)
        return number and abs(value) <= (_LARGEST if hint is int else sys.float_info.max)
    try:
        return isinstance(value, origin or hint)
    except TypeError:
        return True  # no class, such as Any or a protocol that cannot be asked


def _holds(value: Any, kind: type, inner: tuple[Any, ...]) -> bool:
    """A text is one value, whatever it can be cut into; what can be read only once is looked at by who reads it."""
    if kind is list or inner[-1:] == (...,):
        kind = Sequence  # lists and tuples of any length are as good as each other
    if not isinstance(value, kind) or isinstance(value, str | bytes):
        return False
    if isinstance(value, Mapping) != issubclass(kind, Mapping):
        return False  # its keys alone are not what somebody means
    if isinstance(value, Mapping):
        return not inner or all(_fits(key, inner[0]) and _fits(one, inner[1]) for key, one in value.items())
    if not inner or not isinstance(value, Collection):
        return True
    if kind is tuple:
        return len(value) == len(inner) and all(map(_fits, value, inner))
    return all(_fits(one, inner[0]) for one in value)


def _words(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(one) for one in inner))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return "a mapping"
    if inspect.isclass(origin) and issubclass(origin, Iterable):
        each = [_words(one) for one in inner if one is not ...]
        return f"a list of which each is {' or '.join(each)}" if each else "a list"
    if (origin or hint) in _WORDS:
        return _WORDS[origin or hint]
    return f"a {getattr(origin or hint, '__name__', hint)}"
