"""JournalMemoryBlock: Markdown files that people and agents write together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any, ClassVar
from zoneinfo import ZoneInfo

from pydantic import Field, PrivateAttr, field_validator, model_validator
from typing_extensions import Self

from llama_index_memory_tiers.blocks.base import Query
from llama_index_memory_tiers.blocks.by_hand import HandWrittenBlock
from llama_index_memory_tiers.blocks.desk import Desk, Holder
from llama_index_memory_tiers.blocks.journal.files import OwnerFiles, folder_name
from llama_index_memory_tiers.blocks.journal.text import heading, inert, read, removed, sections, written
from llama_index_memory_tiers.budget import Item
from llama_index_memory_tiers.checks import checked
from llama_index_memory_tiers.errors import ConfigurationError
from llama_index_memory_tiers.records import Changes, Scope
from llama_index_memory_tiers.redaction import Redactor, checked_redaction
from llama_index_memory_tiers.storage import OwnerReader, codec
from llama_index_memory_tiers.text import escape

_MAX_KEY_CHARS = 200
_LEAST_BYTES = 1024


class JournalMemoryBlock(HandWrittenBlock):
    """Shows `MEMORY.md` and the newest daily entries of a user; both are plain files that anybody may edit.

    Files are written through `of(memory)`, or with any editor. Every owner has a folder of its own. Nothing is taken
    from the chat. Writers in several processes wait for each other, except on Windows, where only those of one process
    do: let one process write there. `aforget` of a person deletes the folder; `contains=` counts in the receipt how
    often the text stands in the files, which are yours to change; `ids=` and `before=` do not look into them.

    Args:
        directory: Where the folders are.
        timezone: Zone whose midnight begins a new daily file, by its IANA name; default `UTC`. `of(memory,
            timezone=…)` sets a user's own.
        recent_days: Entries of the newest so many days are shown, none older than that by more than one; default 2.
        max_file_bytes: Bound of each file, in bytes; default 262 144. A full daily file is followed by another one;
            a `MEMORY.md` that would grow beyond is refused.
        redaction: A `Redactor` that takes secrets out of what is shown, as people may write some by hand; default
            ours, `None` switches it off. What is written through `of(memory)` passes the memory's own redaction.
    """

    name: str = "Journal"
    directory: Path
    timezone: str = "UTC"
    recent_days: int = Field(default=2, ge=0, le=36_525)
    max_file_bytes: int = Field(default=262_144, ge=_LEAST_BYTES)
    redaction: Any = Field(default="default", exclude=True)
    stable: ClassVar[bool] = True
    _redactor: Redactor | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _redacts(self) -> Self:
        self._redactor = checked_redaction(self.redaction)
        return self

    @field_validator("timezone")
    @classmethod
    def _known_zone(cls, value: str) -> str:
        _zone(value)
        return value

    def of(self, memory: Holder, *, timezone: str | None = None) -> Journal:
        """The files of one memory's owner.

        Args:
            memory: A `TieredMemory` that has this block.
            timezone: The user's zone, by its IANA name; default the block's.

        Returns:
            The journal.

        Raises:
            ConfigurationError: The memory has no such block, or is none of ours, or nobody knows the zone.
        """
        desk = self._desk(memory)
        return Journal(desk, self._files(desk.scope), _zone(timezone or self.timezone))

    async def recall(self, query: Query, reader: OwnerReader) -> Sequence[Item]:  # noqa: ARG002  # it needs files
        """Offer the sections of `MEMORY.md`, then the newest entries."""
        files = self._files(query.scope)
        memory, days = await asyncio.to_thread(_look, files, self.recent_days, query.now)
        clean = self._redactor.text if self._redactor is not None else str
        return [*_memory_items(memory, clean), *_day_items(days, clean)]

    async def forget_owner(self, scope: Scope) -> int:
        """Delete somebody's folder, hand-written files too."""
        return await asyncio.to_thread(self._files(scope).erase)

    async def mentions(self, scope: Scope, text: str) -> int:
        """How often a text stands in somebody's files, which people may have written: they are not changed."""
        return await asyncio.to_thread(self._files(scope).count, text)

    def _files(self, scope: Scope) -> OwnerFiles:
        return OwnerFiles(self.directory / folder_name(scope, per_session=self.per_session), self.max_file_bytes)


class Journal:
    """The files of one owner; made by `JournalMemoryBlock.of`.

    Args:
        desk: Whose.
        files: Where.
        zone: Whose midnight counts.
    """

    def __init__(self, desk: Desk, files: OwnerFiles, zone: tzinfo) -> None:
        self._desk = desk
        self._files = files
        self._zone = zone

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._files.folder

    async def read(self) -> str:
        """The whole of `MEMORY.md`, as it stands there; '' when there is none."""
        return await asyncio.to_thread(self._files.memory)

    async def keys(self) -> list[str]:
        """Headings of `MEMORY.md`, in order."""
        return [section.key for section in sections(await self.read()) if section.key]

    @checked
    async def get(self, key: str) -> str | None:
        """What stands under a heading of exactly these words; `None` when there is none."""
        return read(await self.read(), _key(key))

    @checked
    async def set(self, key: str, text: str) -> None:
        """Write under a heading of `MEMORY.md`, in place of what stood there; all else stays as it is.

        Args:
            key: The heading: one line, not blank.
            text: What is to stand there.

        Raises:
            ConfigurationError: The key is no heading, or the file would be larger than its bound.
        """
        if not isinstance(text, str):
            raise ConfigurationError(
                f"text={text!r:.100} was given.",
                allowed="What stands under a heading is text.",
                remedy="Pass a text, or call remove(key).",
            )
        words, body = _key(codec.storable(self._desk.redacted(_key(key)))), codec.storable(self._desk.redacted(text))
        await self._change(lambda old: written(old, words, body))

    @checked
    async def remove(self, key: str) -> bool:
        """Take a heading and what stands under it out of `MEMORY.md`.

        Args:
            key: The heading.

        Returns:
            Whether it was there.
        """
        words = _key(key)
        return await self._change(lambda old: old if (new := removed(old, words)) is None else new)

    @checked
    async def append(self, text: str) -> Path:
        """Append an entry to today's file, under the time of day.

        Args:
            text: Not blank.

        Returns:
            The file.

        Raises:
            ConfigurationError: The text is blank.
        """
        if not isinstance(text, str) or not text.strip():
            raise ConfigurationError(
                f"text={text!r:.100} was given.",
                allowed="An entry has at least one visible character.",
                remedy="Pass the text, or leave the call out.",
            )
        now = self._desk.now().astimezone(self._zone)
        entry = f"\n## {now:%H:%M:%S}\n\n{inert(codec.storable(self._desk.redacted(text)))}\n"
        path = await asyncio.to_thread(self._files.append, now.date(), entry)
        await self._told()
        return path

    async def today(self) -> str:
        """Today's entries."""
        return await self.day(self._desk.now().astimezone(self._zone).date())

    @checked
    async def day(self, day: date) -> str:
        """Entries of a day, as they stand there; '' when there are none."""
        return await asyncio.to_thread(self._files.day, day)

    async def _change(self, change: Callable[[str], str]) -> bool:
        changed = await asyncio.to_thread(self._files.change_memory, change)
        if changed:
            await self._told()
        return changed

    async def _told(self) -> None:
        """Let contexts know: what was recalled for the running turn is out of date."""
        await self._desk.change(lambda _: Changes())


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ValueError, OSError, TypeError, LookupError):
        raise ConfigurationError(
            f"timezone={name!r:.100} was given.",
            allowed="A zone is named as in the IANA database, for example Asia/Shanghai.",
            remedy="Correct the name; on Windows, install tzdata.",
        ) from None


def _key(key: str) -> str:
    words = heading(codec.storable(key.strip())) if isinstance(key, str) else ""
    if not words or len(words) > _MAX_KEY_CHARS:
        raise ConfigurationError(
            f"key={key!r:.100} was given.",
            allowed=f"A key is one line of 1 to {_MAX_KEY_CHARS} characters.",
            remedy="Pass the words of the heading, without the marks in front of it.",
        )
    return words


# --- in a context ---------------------------------------------------------------------------------------------


def _look(files: OwnerFiles, recent_days: int, now: datetime) -> tuple[str, list[tuple[date, str]]]:
    days = sorted({day for day, _, _ in files.days()}, reverse=True)
    # One day more than asked for, as it may still be yesterday where the user is.
    first = now.date() - timedelta(days=recent_days)
    recent = [day for day in days if day >= first][:recent_days]
    return files.memory(), [(day, files.day(day)) for day in recent]


def _memory_items(text: str, clean: Callable[[str], str]) -> list[Item]:
    found = [section for section in sections(text.encode("utf-8", "replace").decode()) if section.key or section.body]
    return [
        Item(
            _shown(section.key, section.body, clean),
            score=1.0,
            group="memory",
            header="<notes>",
            footer="</notes>",
            order=(0.0, float(at)),
        )
        for at, section in enumerate(found)
    ]


def _day_items(days: Sequence[tuple[date, str]], clean: Callable[[str], str]) -> list[Item]:
    """Entries, the newest first; rendered from the oldest to the newest."""
    items = []
    for number, (day, text) in enumerate(days):
        entries = [one for one in sections(text.encode("utf-8", "replace").decode()) if one.body]
        for at, section in reversed(list(enumerate(entries))):
            items.append(
                Item(
                    _shown(section.key, section.body, clean),
                    group=day.isoformat(),
                    header=f"<day date='{day.isoformat()}'>",
                    footer="</day>",
                    order=(1.0, -float(number), float(at)),
                )
            )
    return items


def _shown(key: str, body: str, clean: Callable[[str], str]) -> str:
    lines = [f"## {key}", body] if key else [body]
    return escape(clean("\n".join(line for line in lines if line)))
