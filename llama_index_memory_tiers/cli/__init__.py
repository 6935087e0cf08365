"""The command line: `memory-tiers`, also `python -m llama_index_memory_tiers.cli`."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from llama_index_memory_tiers.errors import MissingExtraError


def main() -> None:
    """Run the command of this process; ends it with 0 (fine), 1 (a finding or failure) or 2 (usage)."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        error = MissingExtraError(
            f"memory-tiers was called without {' and '.join(missing)}.",
            allowed="The command line comes with the extra 'cli'; the package itself does not need it.",
            remedy="Run: pip install 'llama-index-memory-tiers[cli]'",
        )
        sys.stderr.write(f"{error.given}\n{error.allowed}\n{error.remedy}\n")
        sys.exit(2)
    from llama_index_memory_tiers.cli.app import app  # noqa: PLC0415  # typer is optional

    app(prog_name="memory-tiers")
