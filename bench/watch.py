"""What is measured from outside: CPU time and memory of the processes, bytes on disk. Linux's /proc is used if there.

A thread samples every 50 ms, so that short peaks and processes that end are not missed. The peak of the scheduler's
resident memory is the kernel's own (VmHWM, reset at the start) where that can be reset.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from scheduler_adapter.local.processes import descendants

#: Time between two samples, seconds.
SAMPLE_S = 0.05
#: Time between two searches for new children, seconds: a search reads all of /proc.
CHILDREN_S = 0.5


def rss(pid: int) -> int:
    """Resident memory of a process, bytes."""
    return int(psutil.Process(pid).memory_info().rss)


def reset_peak_rss(pid: int) -> None:
    """Let the kernel's peak start anew. Where that is not allowed the samples alone tell the peak."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def _peak_rss(pid: int) -> int:
    """The kernel's peak of the resident memory, bytes; 0 where it is not known."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def disk_bytes(folder: Path | None) -> int:
    """Bytes allocated by the files below the folder: a sparse file counts what was written."""
    total = 0
    if folder is not None:
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                total += path.stat().st_blocks * 512
    return total


class Usage:
    """CPU time since the start and peak resident memory of some processes, which may come and go."""

    def __init__(self) -> None:
        self._processes: dict[int, psutil.Process] = {}
        self._cpu_start: dict[int, float] = {}
        self._cpu_last: dict[int, float] = {}
        self.rss_max = 0

    def add(self, process: psutil.Process, *, born_now: bool) -> None:
        """Count this process from now on; from its birth if it is younger than the measurement."""
        if process.pid in self._processes:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu = self._cpu(process)
            self._processes[process.pid] = process
            self._cpu_start[process.pid] = 0.0 if born_now else cpu
            self._cpu_last[process.pid] = cpu

    @staticmethod
    def _cpu(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    def sample(self) -> None:
        """Read all of them; what has ended keeps its last reading."""
        rss_now = 0
        for pid, process in self._processes.items():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                self._cpu_last[pid] = self._cpu(process)
                rss_now += process.memory_info().rss
        self.rss_max = max(self.rss_max, rss_now)

    @property
    def cpu_s(self) -> float:
        """CPU time used since the start, seconds."""
        return sum(self._cpu_last[pid] - self._cpu_start[pid] for pid in self._processes)


class Watch:
    """Samples one run between `start` and `stop`."""

    def __init__(self, scheduler_pid: int, daemon_pid: int | None, data: Path | None) -> None:
        self._scheduler_pid = scheduler_pid
        self._daemon_pid = daemon_pid
        #: Folder of the daemon's store; None for stock.
        self.data = data
        self.scheduler = Usage()
        self.daemon = Usage()
        #: Children of the scheduler: the ingest process.
        self.ingest = Usage()
        self.scheduler_rss_idle = 0
        self.disk_bytes_start = 0
        self.disk_bytes_max = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="bench-watch", daemon=True)

    def start(self) -> None:
        """Note where everything stands, and sample from now on."""
        self._find(born_now=False)
        self.disk_bytes_start = self.disk_bytes_max = disk_bytes(self.data)
        reset_peak_rss(self._scheduler_pid)
        self.scheduler_rss_idle = rss(self._scheduler_pid)
        self._thread.start()

    def stop(self) -> None:
        """Take the last sample. May be called again."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._thread.join()
            self._find(born_now=True)
            self._sample()
            self.scheduler.rss_max = max(self.scheduler.rss_max, _peak_rss(self._scheduler_pid))

    def _find(self, *, born_now: bool) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self.scheduler.add(psutil.Process(self._scheduler_pid), born_now=born_now)
            if self._daemon_pid is not None:
                self.daemon.add(psutil.Process(self._daemon_pid), born_now=born_now)
        for child in descendants(self._scheduler_pid):
            self.ingest.add(child, born_now=born_now)

    def _sample(self) -> None:
        for usage in (self.scheduler, self.daemon, self.ingest):
            usage.sample()
        self.disk_bytes_max = max(self.disk_bytes_max, disk_bytes(self.data))

    def _loop(self) -> None:
        searched = time.monotonic()
        while not self._stopping.wait(SAMPLE_S):
            if time.monotonic() - searched > CHILDREN_S:
                self._find(born_now=True)
                searched = time.monotonic()
            self._sample()


class Guard(threading.Thread):
    """Calls `alarm` once, from its own thread, when `check` raises or the deadline has passed."""

    def __init__(self, check: Callable[[], None], deadline: float, alarm: Callable[[BaseException], None]) -> None:
        super().__init__(name="bench-guard", daemon=True)
        self._check = check
        self._deadline = deadline
        self._alarm = alarm
        self._stopping = threading.Event()

    def run(self) -> None:
        """Look four times a second."""
        while not self._stopping.wait(0.25):
            try:
                self._check()
                if time.monotonic() > self._deadline:
                    raise TimeoutError("the time given by --timeout is over")
            except Exception as exc:
                self._alarm(exc)
                return

    def stop(self) -> None:
        """Look no more."""
        self._stopping.set()
        if self.is_alive():
            self.join()
