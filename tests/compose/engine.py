"""A Docker engine of its own, started by hand in a folder and ended by its id; nothing of the machine's own engine is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Programs, and the Debian packages that have them.
PACKAGES = {"dockerd": "docker.io", "docker-compose": "docker-compose", "debootstrap": "debootstrap", "iptables": "iptables"}
START_SECONDS = 60
STOP_SECONDS = 60
#: A socket's path, with its final zero byte, must fit into sun_path; containerd's is the longest.
_SOCKET_BYTES_MAX = 107
_LONGEST_SOCKET = "exec/containerd/containerd.sock.ttrpc"


class Failed(Exception):
    """The test cannot go on, or has failed. Says why."""


def missing() -> list[str]:
    """Debian packages whose programs are not there."""
    there = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [package for program, package in PACKAGES.items() if shutil.which(program, path=there) is None]


def install(packages: Sequence[str]) -> None:
    """By apt-get, without starting what is installed."""
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    run(["apt-get", "-o", "DPkg::Lock::Timeout=600", "install", "-y", "-qq", "--no-install-recommends", *packages], env=env)


def run(words: Sequence[str], env: Mapping[str, str] | None = None, quiet: bool = True, timeout: float = 1800) -> str:
    """What the command printed. Raises Failed, with the end of it, if it fails or takes longer (seconds)."""
    try:
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if quiet else None,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise Failed(f"{words[0]} is not there: {error}") from None
    except subprocess.TimeoutExpired:
        raise Failed(f"{' '.join(words)} took longer than {timeout:.0f} s") from None
    if done.returncode:
        raise Failed(f"{' '.join(words)} ended with {done.returncode}:\n" + "\n".join(done.stdout.splitlines()[-30:]))
    return done.stdout


def wait_until(what: str, seconds: float, true: Callable[[], bool]) -> None:
    """Raises Failed if it is not true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise Failed(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.5)


def mounts_under(folder: Path, mountinfo: str) -> list[Path]:
    """Mount points at and below a folder, innermost first, out of the text of /proc/self/mountinfo."""
    points = [Path(line.split()[4].encode().decode("unicode_escape")) for line in mountinfo.splitlines()]
    return sorted((point for point in points if point.is_relative_to(folder)), key=lambda point: len(point.parts), reverse=True)


class Engine:
    """A running engine; `docker` and `compose` speak to it."""

    def __init__(self, folder: Path, project: str, files: Sequence[Path], env: Mapping[str, str]) -> None:
        self.folder = folder
        self._compose = ["docker-compose", "--project-name", project, *(word for file in files for word in ("-f", str(file)))]
        # No BuildKit: the old builder is in the engine, nothing else has to be there.
        self._env = {
            **os.environ,
            "DOCKER_HOST": f"unix://{folder}/docker.sock",
            "DOCKER_BUILDKIT": "0",
            "COMPOSE_DOCKER_CLI_BUILD": "0",
            **env,
        }

    def docker(self, *words: str, timeout: float = 600) -> str:
        return run(["docker", *words], env=self._env, timeout=timeout)

    def compose(self, *words: str, timeout: float = 1800) -> str:
        return run([*self._compose, *words], env=self._env, timeout=timeout)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """A docker command that goes on; the caller waits for its end."""
        return subprocess.Popen(
            ["docker", *words], env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def container(self, service: str) -> str:
        """Id of the container of a service, running or not."""
        return self.compose("ps", "-q", service).split()[-1]

    def inspect(self, container: str, template: str) -> str:
        return self.docker("inspect", "-f", template, container).strip()


@contextmanager
def engine(folder: Path, project: str, files: Sequence[Path], env: Mapping[str, str]) -> Iterator[Engine]:
    """Start `dockerd` in a folder; at the end stop it, unmount what it left and remove its data. Raises Failed."""
    if len(str(folder / _LONGEST_SOCKET).encode()) > _SOCKET_BYTES_MAX:
        raise Failed(f"{folder} is too long for the sockets inside it; choose a shorter --folder")
    data = folder / "data"
    words = ["dockerd", "--host", f"unix://{folder}/docker.sock", "--data-root", str(data), "--exec-root", str(folder / "exec")]
    words += ["--pidfile", str(folder / "docker.pid")]
    # Nothing of the machine's network is changed: no default bridge, no packet filter. The cluster has its own bridge, without a way out.
    words += ["--bridge", "none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
    # The default takes a right that is often missing inside a container, in which this may run.
    words += ["--oom-score-adjust", "0"]
    env_path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    log = folder / "dockerd.log"
    with log.open("w") as out:
        # A session of its own: Ctrl-C reaches only us, and we take down in order.
        daemon = subprocess.Popen(
            words, env={**os.environ, "PATH": env_path}, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        there = Engine(folder, project, files, env)

        def answers() -> bool:
            if daemon.poll() is not None:
                raise Failed(f"dockerd ended with {daemon.returncode}:\n" + "\n".join(log.read_text().splitlines()[-15:]))
            try:
                there.docker("version", timeout=10)
            except Failed:
                return False
            return True

        wait_until(f"dockerd answers ({log})", START_SECONDS, answers)
        yield there
    finally:
        daemon.terminate()
        try:
            daemon.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
        for point in mounts_under(folder, Path("/proc/self/mountinfo").read_text()):
            subprocess.run(["umount", "--lazy", str(point)], check=False)
        for path in (data, folder / "exec"):
            shutil.rmtree(path, ignore_errors=True)
