"""What a daemon is told at start: frozen, validated once (`taskdb.cli.serve`), handed down. Defaults are the shipped ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from taskdb import limits

Durability = Literal["fsync", "os"]

#: Where the daemon listens and the command line looks, if nothing else is said.
ADDRESS_DEFAULT = "127.0.0.1:7070"


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where the data is and how safe it is kept."""

    #: Folder of the store; made if it is not there.
    path: Path
    #: "fsync": a group commit is on disk before it is acknowledged. "os": left to the page cache; a power cut may corrupt.
    durability: Durability = "fsync"
    #: Bytes in use the store may not grow beyond.
    bytes_max: int = limits.STORE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """Who may call, and how the daemon shows itself. See `taskdb.server.listening` for what must come together."""

    #: PEM files: the daemon's certificate and its key (None: in the same file); certificates that vouch for clients' (None: not asked for).
    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    #: What every call must carry. None: nothing.
    token: str | None = field(default=None, repr=False)
    #: Listen where others can reach it all the same.
    insecure: bool = False

    @property
    def tls(self) -> bool:
        return self.cert is not None


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the daemon serves. May change at each start."""

    store: StoreConfig
    #: HOST:PORT or tls://HOST:PORT (port 0: any free one), or unix:PATH.
    listen: str = ADDRESS_DEFAULT
    access: AccessConfig = AccessConfig()
    #: Longest time between an applied command and its commit, in milliseconds.
    commit_interval_ms: int = limits.COMMIT_INTERVAL_MS
    #: Commit at once when so many commands are uncommitted.
    commit_commands_max: int = limits.COMMIT_COMMANDS_MAX
    #: Bytes of the history (what became of tasks, and when); 0: none is kept.
    history_bytes_max: int = limits.HISTORY_BYTES_MAX
    #: Written with the address, in one rename, when the daemon serves. None: not written.
    ready_file: Path | None = None
    #: End when stdin closes or the parent process changes (for a daemon that is the child of a scheduler).
    exit_with_parent: bool = False
    #: HOST:PORT of the metrics. None: not served.
    metrics: str | None = None
    #: Removed, with all that is in it, if the parent has ended: nobody else would. None: nothing is.
    temporary: Path | None = None
