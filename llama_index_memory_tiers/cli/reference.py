"""The command line as Markdown, from the same texts as `--help`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer.main

from llama_index_memory_tiers.cli.app import app

_HEAD = """\
# memory-tiers

{help}

Install it with `pip install 'llama-index-memory-tiers[cli]'`. Every command writes one JSON document with `--json`;
`MEMORY_TIERS_STORAGE` stands for `--storage`. Without `--memory` a command shows what the storage holds through blocks
that only read; with `--memory module:factory` it uses the blocks of your own `TieredMemory`:

    # yours.py
    def memory(storage, user_id=None, session_id="worker"):
        return TieredMemory(storage=storage, user_id=user_id, session_id=session_id, memory_blocks=[…])

    memory-tiers worker --memory yours:memory --storage postgresql+asyncpg://user@host/database

This page is made from `--help`: `python -m llama_index_memory_tiers.cli.reference docs/cli.md`.
"""


def commands() -> dict[str, Any]:
    """The commands by name, as typer made them."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def as_markdown() -> str:
    """Write all commands with their arguments and options."""
    group: Any = typer.main.get_command(app)
    parts = [_HEAD.format(help=group.help)]
    for name, command in commands().items():
        rows = [_row(parameter) for parameter in command.params]
        usage = " ".join(["memory-tiers", name, *(_usage(p) for p in command.params if _is_argument(p)), "[OPTIONS]"])
        table = "\n".join(["| option | what it does | default |", "|---|---|---|", *rows])
        parts.append(f"## {name}\n\n{command.help}\n\n    {usage}\n\n{table}\n")
    return "\n".join(parts)


def _is_argument(parameter: Any) -> bool:
    return str(parameter.param_type_name) == "argument"


def _usage(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _row(parameter: Any) -> str:
    name = _usage(parameter) if _is_argument(parameter) else ", ".join(f"`{each}`" for each in parameter.opts)
    default = (
        parameter.default if parameter.default not in (None, False, []) and not callable(parameter.default) else ""
    )
    return f"| {name} | {parameter.help or ''} | {default} |".replace("  |", " |")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(as_markdown(), encoding="utf-8")
