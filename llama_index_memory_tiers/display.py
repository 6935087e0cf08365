"""Tables for people: plain text, escaped HTML for notebooks, rich for terminals."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

# Line breaks, and what joins letters and emoji.
_KEPT = frozenset("\n\t\u200c\u200d")
_WIDE = 120  # columns of a terminal from which whole ids find room beside texts
_SHORTEST = 8


@dataclass(frozen=True, slots=True)
class Grid:
    """One table.

    Args:
        heads: Names of the columns.
        rows: Cells; anything that can be written as text.
        title: A line above it.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[Any]] = field(default=())
    title: str = ""


class Shown:
    """Base of reports: shown wherever people look, from the same grids.

    A report says what it consists of in `_grids`.
    """

    __slots__ = ()

    def _grids(self) -> Sequence[Grid]:
        raise NotImplementedError

    def _details(self) -> Sequence[Grid]:
        """What is shown where there is room for it: in notebooks and terminals, not in `str()`."""
        return ()

    def __str__(self) -> str:
        return as_text(self._grids())

    def _repr_html_(self) -> str:
        return as_html([*self._grids(), *self._details()])

    def __rich__(self) -> Any:
        return as_rich([*self._grids(), *self._details()])


def harmless(text: str) -> str:
    """A text without what a terminal would obey, such as colour codes and cursor moves; they are shown instead.

    Args:
        text: Any.

    Returns:
        The text; characters that reverse the direction of writing or hide are shown as their numbers too.
    """
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter.isprintable() or letter in _KEPT or unicodedata.category(letter) in {"Zs", "Zl", "Zp"}
        else f"\\u{{{ord(letter):x}}}"
        for letter in text
    )


def counted(number: int, noun: str) -> str:
    """A number with its noun: `1 message`, `2 messages`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Write rows below heads, in columns."""
    lines = [[_cell(cell) for cell in row] for row in (heads, *rows)]
    widths = [max(_width(line[at]) for line in lines) for at in range(len(heads))]
    return "\n".join(
        "  ".join(cell + " " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def as_text(grids: Sequence[Grid]) -> str:
    """Tables for a terminal or a log."""
    parts = []
    for grid in grids:
        lines = [harmless(grid.title)] if grid.title else []
        parts.append("\n".join([*lines, table(grid.heads, grid.rows)] if grid.heads else lines))
    return "\n\n".join(parts)


def as_html(grids: Sequence[Grid]) -> str:
    """Tables for a notebook; everything in them is escaped."""
    return "".join(_html(grid) for grid in grids)


def _html(grid: Grid) -> str:
    title = f"<p>{html.escape(harmless(grid.title))}</p>" if grid.title else ""
    if not grid.heads:
        return title
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in grid.heads)
    rows = "".join(
        f"<tr>{''.join(f'<td>{html.escape(harmless(str(cell)))}</td>' for cell in row)}</tr>" for row in grid.rows
    )
    return f"{title}<table><tr>{heads}</tr>{rows}</table>"


def as_rich(grids: Sequence[Grid]) -> Any:
    """Tables for a terminal, by rich; stored text is never read as markup.

    Args:
        grids: The tables.

    Returns:
        A renderable; only rich asks for one, so it is there.
    """
    from rich.console import Group  # noqa: PLC0415  # optional
    from rich.text import Text  # noqa: PLC0415  # optional

    parts: list[Any] = []
    for grid in grids:
        if grid.title:
            parts.append(Text(harmless(grid.title)))
        if grid.heads:
            parts.append(_RichGrid(grid))
    return Group(*parts)


@dataclass(frozen=True, slots=True)
class _RichGrid:
    """A table for rich; where there is little room, it shows as much of an id as tells it from the others."""

    grid: Grid

    def __rich_console__(self, _: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table  # noqa: PLC0415  # optional
        from rich.text import Text  # noqa: PLC0415  # optional

        narrow = options.max_width < _WIDE
        made = Table(highlight=False)
        for head in self.grid.heads:
            # An id that was folded could not be copied.
            made.add_column(Text(head), overflow="fold", no_wrap=narrow and head == "id")
        columns = [
            _short(column) if narrow and head == "id" else column
            for head, column in zip(self.grid.heads, zip(*self.grid.rows, strict=True), strict=False)
        ]
        for row in zip(*columns, strict=True):
            made.add_row(*(_rich_cell(cell) for cell in row))
        yield made


def _short(ids: Sequence[Any]) -> list[str]:
    """The beginnings of ids, all of one length, by which they still differ."""
    whole = [str(each) for each in ids]
    longest = max(map(len, whole), default=0)
    fits = (size for size in range(_SHORTEST, longest) if len({each[:size] for each in whole}) == len(set(whole)))
    size = next(fits, longest)
    return [each[:size] for each in whole]


def _rich_cell(cell: Any) -> Any:
    from rich.text import Text  # noqa: PLC0415  # optional

    return Text(harmless(str(cell)), justify="right" if isinstance(cell, int | float) else "left")


def _cell(cell: Any) -> str:
    return " ".join(harmless(str(cell)).split("\n"))


def _width(text: str) -> int:
    """Columns that a terminal gives to a text: Chinese characters take two."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
