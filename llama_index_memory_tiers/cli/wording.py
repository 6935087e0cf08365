"""Errors of the package in the words of whoever typed a command: its options, not Python's arguments."""

from __future__ import annotations

import re

_OPTIONS = {
    "user_id": "--user",
    "session_id": "--session",
    "table_name": "--table-name",
    "db_schema": "--db-schema",
    "storage": "--storage",
    "scope": "--scope",
    "target": "FILE",
    "source": "FILE",
    "folder": "FILE",
}
_NAMES = "|".join(_OPTIONS)
_THINGS = "|".join(name for name in _OPTIONS if name != "folder")  # a folder is also the one that a file is in
# An argument with its value, or named as a thing; the same words without either are English.
_ARGUMENT = re.compile(rf"(?<![\w-])({_NAMES})=")
_NAMED = re.compile(rf"(?<=\b)((?:an?|another|own|the|without|is also this storage's) )({_THINGS})(?=\b)(?! of a )")
_SUBJECT = re.compile(r"^(target|source) is ")
_PHRASES = (
    (re.compile(r", or an? (open )?stream of bytes"), ""),
    (
        re.compile(r"Call Storage\(.*"),
        "Pass another --table-name to start anew. Python's `Storage.adopt` takes it over.",
    ),
    (
        re.compile(r"Embed the records again with .*?, or use"),
        "Embed the records again with `memory-tiers reindex --memory module:factory`, or use",
    ),
    (re.compile(r"repeat the call: .*"), "run the command again."),
    (re.compile(r"make the memory with --user=…"), "name one with --user"),
    (re.compile(r"Make the memory with the --user of the export"), "Leave --user and --session out"),
)


def spoken(text: str) -> str:
    """An error's text with options in place of arguments.

    Args:
        text: One of an error's three parts.

    Returns:
        The same for a command line.
    """
    text = _ARGUMENT.sub(lambda found: f"{_OPTIONS[found[1]]}=", text)
    text = _NAMED.sub(lambda found: found[1] + _OPTIONS[found[2]], text)
    text = _SUBJECT.sub("It is ", text)
    for phrase, said in _PHRASES:
        text = phrase.sub(said, text)
    return text
