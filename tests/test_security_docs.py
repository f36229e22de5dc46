"""Every command of docs/security.md runs, in the order in which it stands there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client
from distributed.security import Security

from scheduler_adapter.local.processes import Processes, Spawned, await_port, free_port
from tests.support.commands import problems

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs/security.md").read_text()
BLOCKS = dict(re.findall(r"^<!-- tested: (\w+) -->\n```bash\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))
#: Said to the environment.
SETTING = re.compile(r"[A-Z_]+=")
#: For every single thing that is waited for.
PATIENCE_SECONDS = 60.0

pytestmark = pytest.mark.e2e


def test_every_block_is_run() -> None:
    assert TEXT.count("```bash") == len(BLOCKS)
    assert set(BLOCKS) == {"certificates", *SCENES}


def test_commands_and_options_exist() -> None:
    for text in BLOCKS.values():
        for line in text.splitlines():
            assert problems([word for word in shlex.split(line) if not SETTING.match(word)]) == []


def test_linked_limits_are_the_real_ones() -> None:
    from taskdb import limits
    from taskdb.server import service

    for number in (
        limits.CONNECTIONS_MAX,
        limits.CONNECTION_CALLS_MAX,
        limits.CALLS_MAX,
        limits.PROBES_MAX,
        limits.MESSAGE_BYTES_MAX // limits.MIB,
        limits.HANDSHAKE_MS_MAX // 1000,
        limits.IDLE_MS_MAX // 60_000,
        service.OUTGOING_PAUSE,
        service.OUTGOING_MAX,
        int(service.SEND_SECONDS_MAX),
        service.READS_MAX,
        service.READS_WAITING_MAX,
        int(service.READ_SECONDS_MAX),
    ):
        assert re.search(rf"\b{number:,}\b", TEXT), number


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificates and the token, made as the page says."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    folder = tmp_path_factory.mktemp("security")
    for line in (*BLOCKS["certificates"].splitlines(), *BLOCKS["token"].splitlines()[:2]):
        subprocess.run(line, shell=True, cwd=folder, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    return folder


class Scene:
    """One block of the page: what serves goes on in the background, the rest runs to its end."""

    def __init__(self, processes: Processes, folder: Path, name: str) -> None:
        self.processes = processes
        self.folder = folder
        self.ports = {"7070": free_port(), "8786": free_port()}
        self.env = {"TASKDB_URL": f"127.0.0.1:{self.ports['7070']}"}
        self.statuses: list[str] = []
        for words in (shlex.split(line) for line in BLOCKS[name].splitlines()):
            self._run([re.sub(r":(7070|8786)\b", lambda hit: f":{self.ports[hit[1]]}", word) for word in words])

    def _run(self, words: list[str]) -> None:
        if SETTING.match(words[0]):
            name, _, value = words.pop(0).partition("=")
            self.env[name] = value
        match words[:2]:
            case ["taskdb", "serve"]:
                daemon = self._start("daemon", words)
                self._until(daemon, lambda: "serving" in daemon.said())
            case ["dask", "scheduler"]:
                # Others are not to be in the way of the default ports.
                scheduler = self._start("scheduler", [*words, "--host", "127.0.0.1", "--port", str(self.ports["8786"]), "--no-dashboard"])
                await_port(scheduler, self.ports["8786"], PATIENCE_SECONDS)
                self._until(scheduler, lambda: "Scheduler at:" in scheduler.said())
            case ["dask", "worker"]:
                self._start("worker", [*words, "--no-dashboard", "--no-nanny"])
            case ["taskdb", "status"]:
                self.statuses.append(self._to_its_end([sys.executable, "-m", *words]))
            case _:
                assert words[0] in ("install", "openssl"), words

    def _start(self, name: str, words: list[str]) -> Spawned:
        return self.processes.start(name, ["-m", *words], self.env)

    def _until(self, spawned: Spawned, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not ready():
            spawned.check()
            assert time.monotonic() < deadline, spawned.tail()
            time.sleep(0.05)

    def _to_its_end(self, words: list[str]) -> str:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **self.env}
        done = subprocess.run(words, cwd=self.folder, env=env, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def folder(files: Path, tmp_path: Path) -> Path:
    for path in files.iterdir():
        shutil.copy2(path, tmp_path)
    return tmp_path


SCENES = {"socket": True, "token": True, "mutual": True, "server": False, "insecure": False}


@pytest.mark.parametrize(("name", "attached"), SCENES.items(), ids=SCENES)
def test_the_block_runs(folder: Path, name: str, attached: bool) -> None:
    with Processes(folder) as processes:
        scene = Scene(processes, folder, name)
        assert scene.statuses
        for shown in scene.statuses:
            assert ("not attached" in shown) != attached, shown
        if name == "mutual":
            _a_job(scene, folder)
        processes.check()


def _a_job(scene: Scene, folder: Path) -> None:
    """Of a small graph, and of one that goes through the ingest process, to the daemon by itself."""
    paths = {"tls_ca_file": "ca.pem", "tls_client_cert": "dask.pem", "tls_client_key": "dask.key"}
    security = Security(require_encryption=True, **{name: str(folder / path) for name, path in paths.items()})
    with Client(f"tls://127.0.0.1:{scene.ports['8786']}", security=security, set_as_default=False) as client:
        assert client.submit(sum, [1, 2, 3]).result(timeout=PATIENCE_SECONDS) == 6
        many = client.map(abs, range(-1200, 0))
        assert sum(client.gather(many[:50])) == sum(range(1151, 1201))
        state = client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.taskdb.ingest.pid)
        assert state
