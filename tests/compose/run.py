"""`python -m tests.compose.run --folder F`: the compose file is run for real, and its scheduler and daemon are killed in mid-job.

An engine (Debian's docker.io) is started by hand in the folder, the base image is made by debootstrap, the project's wheels are carried in.
Then: up; a job from a client's container; a crash of the scheduler and one of the daemon, after which the restart policy brings them back;
`docker kill` of both, which to the engine is a stop by hand, after which the same `up` brings them back; the right result; a graceful stop;
down. Needs root. Exits with 1 if anything was not as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from scheduler_adapter.local.processes import interruptible
from tests.compose import image, job
from tests.compose.engine import ROOT, Engine, Failed, engine, install, missing, run, wait_until

PROJECT = "taskdb-compose-test"
FILES = (ROOT / "docker-compose.yml", ROOT / "tests/compose/small.yml")
SERVICES = ("taskdb", "scheduler", "worker-1", "worker-2")
WORKERS = ("worker-1", "worker-2")
BACK_SECONDS = 120
JOB_SECONDS = 900
IMAGE = "dask-taskdb:0.1.0"


@dataclass(frozen=True)
class Kill:
    """What is killed once so much of the job's blocks has run."""

    service: str
    share: float
    #: True: `docker kill`. False: its main process dies, as in a crash.
    by_hand: bool


KILLS = (
    Kill("scheduler", 0.1, by_hand=False),
    Kill("taskdb", 0.25, by_hand=False),
    Kill("scheduler", 0.4, by_hand=True),
    Kill("taskdb", 0.55, by_hand=True),
)

_STARTED = time.monotonic()


def tell(words: str) -> None:
    print(f"{time.monotonic() - _STARTED:7.1f} s  {words}", flush=True)


def await_health(there: Engine, service: str) -> None:
    """Raises Failed if it takes too long."""
    container = there.container(service)
    wait_until(f"{service} is healthy", BACK_SECONDS, lambda: there.inspect(container, "{{.State.Health.Status}}") == "healthy")


def runs(there: Engine) -> list[int]:
    """First numbers of the blocks that have run, once for each time that they did."""
    noted: list[int] = []
    for worker in WORKERS:
        text = there.docker("exec", there.container(worker), "sh", "-c", f"cat {job.RUNS} 2>/dev/null || true")
        noted += [int(line) for line in text.split()]
    return noted


def kill(there: Engine, what: Kill) -> None:
    """Kill it, and see to it that it is back: by the restart policy alone, or by `up`. Raises Failed."""
    container = there.container(what.service)
    before = int(there.inspect(container, "{{.RestartCount}}"))
    pid = int(there.inspect(container, "{{.State.Pid}}"))
    if what.by_hand:
        there.docker("kill", "-s", "KILL", container)
        wait_until(f"{what.service} has ended", 30, lambda: there.inspect(container, "{{.State.Running}}") == "false")
        tell(f"docker kill -s KILL {what.service}: {there.inspect(container, '{{.State.Status}} ({{.State.ExitCode}})')}, not restarted")
        there.compose("up", "--detach", "--no-build")
        how = "docker-compose up"
    else:
        os.kill(pid, signal.SIGKILL)
        tell(f"kill -9 of the main process of {what.service} ({pid})")
        wait_until(f"{what.service} is restarted", BACK_SECONDS, lambda: int(there.inspect(container, "{{.RestartCount}}")) > before)
        how = "the restart policy"
    await_health(there, what.service)
    tell(f"{what.service} was brought back by {how}, and is healthy")


def result(text: str) -> int:
    """What the client printed last, among what it logged. Raises Failed."""
    for line in reversed(text.splitlines()):
        if line.startswith('{"result"'):
            return int(json.loads(line)["result"])
    raise Failed("the client printed no result; it said:\n" + "\n".join(text.splitlines()[-30:]))


def submit_and_kill(there: Engine, blocks: int) -> None:
    """The job, and all kills in it. Raises Failed."""
    network = f"{PROJECT}_default"
    script = f"{ROOT}/tests/compose/job.py:/job.py:ro"
    words = [
        "--rm",
        "--network",
        network,
        "--volume",
        script,
        "dask-taskdb:0.1.0",
        "python",
        "/job.py",
        "tcp://scheduler:8786",
        str(blocks),
    ]
    client = there.start("run", *words)
    try:
        for what in KILLS:

            def due(what: Kill = what) -> bool:
                if client.poll() is not None:
                    raise Failed(f"the client ended before {what.service} was killed:\n{client.communicate()[0]}")
                return len(runs(there)) >= what.share * blocks

            wait_until(f"{what.share:.0%} of the blocks have run", JOB_SECONDS, due)
            tell(f"{len(runs(there))} of {blocks} blocks have run")
            kill(there, what)
        said, _ = client.communicate(timeout=JOB_SECONDS)
    finally:
        client.kill()
        client.wait()
    for line in said.splitlines():
        tell(f"client: {line}")
    got = result(said)
    if got != job.expected(blocks):
        raise Failed(f"the client printed {got}, not {job.expected(blocks)}")
    tell(f"the client printed the right result: {got}")
    noted = runs(there)
    if len(set(noted)) != blocks:
        raise Failed(f"{len(set(noted))} of {blocks} blocks have run")
    tell(f"{blocks} blocks ran {len(noted)} times")


def stop(there: Engine) -> None:
    """A graceful end of each: SIGTERM, exit code 0. Raises Failed."""
    containers = {service: there.container(service) for service in SERVICES}
    there.compose("stop")
    codes = {service: there.inspect(container, "{{.State.ExitCode}}") for service, container in containers.items()}
    if set(codes.values()) != {"0"}:
        raise Failed(f"exit codes after SIGTERM: {codes}")
    tell("stopped by SIGTERM: all four exited with 0")
    there.compose("start")
    await_health(there, "taskdb")
    verified = there.docker("exec", there.container("taskdb"), "taskdb", "verify", "--data", "/var/lib/taskdb")
    tell(f"started again; taskdb verify: {verified.strip().splitlines()[-1].strip()}")


def check(folder: Path, blocks: int) -> None:
    if os.geteuid() != 0:
        raise Failed("an engine can only be started by root; run this with sudo")
    if packages := missing():
        tell(f"apt-get install {' '.join(packages)}")
        install(packages)
    tell(run(["dockerd", "--version"]).strip() + "; " + run(["docker-compose", "--version"]).strip())
    system = image.base(folder)
    tell(f"base image: {system.name}, {system.stat().st_size >> 20} MiB")
    tell(f"{image.wheels(ROOT)} wheels are carried in")
    env = {"BASE": image.NAME, "WHEELS": "build/wheels"}
    with engine(folder, PROJECT, FILES, env) as there:
        tell("dockerd answers")
        image.load(there, system)
        there.compose("build")
        tell("image built: no network, no registry")
        try:
            there.compose("up", "--detach", "--no-build")
            for service in SERVICES:
                await_health(there, service)
            tell("up: all four services are healthy")
            submit_and_kill(there, blocks)
            stop(there)
        except Failed:
            (folder / "services.log").write_text(there.compose("logs", "--no-color"))
            tell(f"logs of the services: {folder / 'services.log'}")
            raise
        finally:
            there.compose("down", "--volumes")
            tell("down")
    tell("dockerd has ended")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compose.run", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="for the engine and the base image (some GiB); the base image stays there"
    )
    parser.add_argument("--blocks", type=int, default=800, metavar="N", help="blocks of the job, 0.1 s each (default %(default)s)")
    args = parser.parse_args()
    folder = args.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with interruptible():
            check(folder, args.blocks)
    except Failed as failed:
        tell(f"FAILED: {failed}")
        return 1
    except KeyboardInterrupt:
        tell("stopped")
        return 130
    tell("all is as it should be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
