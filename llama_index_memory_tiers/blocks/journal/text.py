"""Markdown in sections: read and changed by heading, everything else byte for byte as it was."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_HEADING = re.compile(r"##[ \t]+(?P<key>.*?)(?:[ \t]+#+)?[ \t]*$")
_TOP = re.compile(r"#[ \t]")
_FENCE = re.compile(r" {0,3}(?P<mark>`{3,}|~{3,})(?P<rest>.*)$")
_INERT = re.compile(r"^(?P<slashes>\\*)(?=##?[ \t])", re.MULTILINE)
_ACTIVE = re.compile(r"^\\(?=\\*##?[ \t])", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a text under one heading.

    Args:
        key: The heading; '' for what stands before the first one.
        body: What stands under it, without blank lines around.
        start: First line, the heading's.
        end: Line behind the last one.
    """

    key: str
    body: str
    start: int
    end: int


def sections(text: str) -> list[Section]:
    """Read a text by its second-level headings; those inside of fenced code are none.

    Args:
        text: Markdown.

    Returns:
        Sections in order; the first has the key '' and may be empty. A first-level heading ends a section, and what
        follows it belongs to none.
    """
    lines = text.splitlines(keepends=True)
    starts: list[tuple[int, str]] = [(0, "")]
    for at in _outside_code(lines):
        line = lines[at].rstrip("\r\n").removeprefix("\ufeff")
        heading = _HEADING.match(line)
        if heading is not None:
            starts.append((at, heading["key"].strip()))
        elif _TOP.match(line) and at:
            starts.append((at, ""))
    ends = [start for start, _ in starts[1:]] + [len(lines)]
    return [
        Section(key, _body(lines[start + bool(key) : end]), start, end)
        for (start, key), end in zip(starts, ends, strict=True)
    ]


def _outside_code(lines: Sequence[str]) -> Iterator[int]:
    """Numbers of the lines that are not inside fenced code; a fence that nobody closes is none."""
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at].rstrip("\r\n"))
        end = _closing(lines, at, fence["mark"]) if fence is not None else None
        yield at
        at = at + 1 if end is None else end + 1


def _closing(lines: Sequence[str], start: int, mark: str) -> int | None:
    for at in range(start + 1, len(lines)):
        fence = _FENCE.match(lines[at].rstrip("\r\n"))
        if fence is not None and fence["mark"].startswith(mark) and not fence["rest"].strip():
            return at
    return None


def _body(lines: Sequence[str]) -> str:
    return "".join(lines).replace("\r\n", "\n").strip("\n").rstrip()


def heading(key: str) -> str:
    """A key as it is read again once it stands in a text; '' when it cannot be one."""
    found = _HEADING.match(f"## {key}") if len(key.splitlines()) == 1 else None
    return "" if found is None else found["key"].strip()


def read(text: str, key: str) -> str | None:
    """What stands under a heading of exactly these words; `None` when there is none."""
    found = next((section for section in sections(text) if section.key == key and key), None)
    return None if found is None else _ACTIVE.sub("", found.body)


def written(text: str, key: str, body: str) -> str:
    """The text with this under the heading, in place of what stood there, or at its end.

    Args:
        text: Markdown.
        key: The heading.
        body: What is to stand there; headings in it are made inert.

    Returns:
        The text; all other sections are as they were.
    """
    newline = "\r\n" if "\r\n" in text else "\n"
    section = f"## {key}\n\n{inert(body)}\n".replace("\n", newline)
    found = next((one for one in sections(text) if one.key == key), None)
    lines = text.splitlines(keepends=True)
    if found is None:
        before = "".join(lines)
        gap = "" if not before else newline if before.endswith(("\n", "\r")) else newline * 2
        return before + gap + section
    after = "".join(lines[found.end :])
    return "".join(lines[: found.start]) + section + (newline + after if after else "")


def removed(text: str, key: str) -> str | None:
    """The text without the section of this heading; `None` when there is none."""
    found = next((one for one in sections(text) if one.key == key), None)
    if found is None:
        return None
    lines = text.splitlines(keepends=True)
    return "".join((*lines[: found.start], *lines[found.end :]))


def inert(body: str) -> str:
    """Text that opens no section: its headings get a backslash, and an open code fence is closed."""
    clean = _INERT.sub(r"\\\g<slashes>", "\n".join(body.splitlines()).strip("\n").rstrip())
    lines = clean.split("\n")
    open_mark = ""
    for line in lines:
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if not open_mark:
            open_mark = fence["mark"]
        elif fence["mark"].startswith(open_mark) and not fence["rest"].strip():
            open_mark = ""
    return f"{clean}\n{open_mark}" if open_mark else clean
