"""Daemon, scheduler and workers as processes of their own, that can be killed. All logs go into one folder."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
START_SECONDS_MAX = 90.0

#: What no log may hold, and what is let pass of it: stock's own words about killed workers and planned failures.
BAD = re.compile(r"Traceback|AssertionError|CRITICAL|\bERROR\b|InvariantBroken|coroutine .* was never awaited|Task exception was never")
PASS = re.compile(
    r"graph of client .* refused: Error during deserialization"
    # Stock, when a client leaves while something is told to it; and when workers are killed.
    r"|Closed comm .* while trying to write|Batched Comm Closed"
    r"|already computed task|lose scattered data|lost all workers|Couldn't gather|Heartbeat to scheduler"
)


class ClusterFailed(Exception):
    pass


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Cluster:
    def __init__(self, folder: Path, *, window: int, workers: int, stock: bool = False, durability: str = "os"):
        self.stock = stock
        self.folder = folder
        self.window = window
        self.wanted_workers = workers
        self.durability = durability
        self.port = free_port()
        self.url = f"127.0.0.1:{self.port}"
        self.address = ""
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.count = 0
        self.killed = 0
        self.offsets: dict[str, int] = {}
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]),
            "DASK_DISTRIBUTED__SCHEDULER__VALIDATE": "True",
            "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "100000",
            "DASK_DISTRIBUTED__ADMIN__LOW_LEVEL_LOG_LENGTH": "100000",
        }
        self.env.pop("PYTHONDONTWRITEBYTECODE", None)

    def _spawn(self, name: str, *args: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                ["nice", "-n", "5", sys.executable, *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self.env,
                start_new_session=True,
            )

    def start(self) -> None:
        self.start_daemon()
        contact = self.folder / "scheduler.json"
        options = ["--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
        options += ["--scheduler-file", str(contact)]
        if not self.stock:
            options += ["--preload", "scheduler_adapter", "--taskdb-url", self.url, "--taskdb-window", str(self.window)]
        self.scheduler = self._spawn("scheduler", "-m", "dask", "scheduler", *options)
        deadline = time.monotonic() + START_SECONDS_MAX
        while not (contact.exists() and contact.read_text().rstrip().endswith("}")):
            self.check()
            if time.monotonic() > deadline:
                raise ClusterFailed("the scheduler did not start")
            time.sleep(0.05)
        self.address = json.loads(contact.read_text())["address"]
        for _ in range(self.wanted_workers):
            self.start_worker()

    def start_daemon(self) -> None:
        self.daemon = self._spawn(
            "daemon", "-m", "taskdb", "serve", "--data", str(self.folder / "data"), "--listen", self.url, "--durability", self.durability
        )

    def kill_daemon(self) -> None:
        self.daemon.kill()
        self.daemon.wait()

    def start_worker(self) -> None:
        self.count += 1
        name = f"w{self.count}"
        self.workers[name] = self._spawn(
            f"worker-{name}", "-m", "dask", "worker", self.address, "--nthreads", "1", "--no-nanny", "--no-dashboard",
            "--name", name, "--host", "127.0.0.1", "--local-directory", str(self.folder),
        )  # fmt: skip

    def kill_worker(self, name: str) -> None:
        process = self.workers.pop(name)
        process.kill()
        process.wait()
        self.killed += 1

    def check(self) -> None:
        """Raises ClusterFailed if a process has ended by itself."""
        for name, process in {"daemon": self.daemon, "scheduler": getattr(self, "scheduler", None), **self.workers}.items():
            if process is not None and process.poll() is not None:
                raise ClusterFailed(f"{name} ended with code {process.returncode}")

    def status(self) -> dict[str, object]:
        done = subprocess.run(
            [sys.executable, "-m", "taskdb", "status", "--url", self.url, "--output", "json"],
            capture_output=True, text=True, check=False, env=self.env, cwd=self.folder,
        )  # fmt: skip
        return json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr}

    def tasks(self, limit: int = 40) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "taskdb", "tasks", "--url", self.url, "--limit", str(limit)],
            capture_output=True, text=True, check=False, env={**self.env, "COLUMNS": "200"}, cwd=self.folder,
        )  # fmt: skip
        return done.stdout + done.stderr

    def complaints(self) -> list[str]:
        """New lines of the scheduler's and daemon's logs that must not be there, with what follows."""
        out = []
        for name in ("scheduler", "daemon"):
            path = self.folder / f"{name}.log"
            data = path.read_bytes()[self.offsets.get(name, 0) :]
            self.offsets[name] = self.offsets.get(name, 0) + len(data)
            for entry in re.split(r"\n(?=\d{4}-\d\d-\d\d |taskdb: )", data.decode(errors="replace")):
                if BAD.search(entry) and not PASS.search(entry):
                    out.append(f"{name}.log: " + "\n    ".join(entry.splitlines()[:60]))
        return out

    def stop(self) -> None:
        processes = [*self.workers.values(), getattr(self, "scheduler", None), self.daemon]
        for process in processes:
            if process is not None and process.poll() is None:
                process.kill()
        for process in processes:
            if process is not None:
                process.wait()
