"""The parts of the compose test that need no engine; `make compose-test` runs the whole."""

from __future__ import annotations

from pathlib import Path

import dask
import dask.array as da
import pytest
import yaml

from tests.compose import image, job
from tests.compose.engine import ROOT, Failed, engine, mounts_under, run, wait_until
from tests.compose.run import FILES, KILLS, SERVICES, WORKERS, result

MOUNTS = """\
21 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 21 0:45 / /there/data/overlay2/a/merged rw - overlay overlay rw
31 30 0:46 / /there/data/overlay2/a/merged/shm rw - tmpfs shm rw
32 21 0:47 / /there/netns\\040one rw - nsfs nsfs rw
33 21 0:48 / /therefore rw - tmpfs tmpfs rw
"""


def test_mounts_are_found_innermost_first() -> None:
    found = [str(point) for point in mounts_under(Path("/there"), MOUNTS)]
    merged = "/there/data/overlay2/a/merged"
    assert found == [f"{merged}/shm", merged, "/there/netns one"]
    assert mounts_under(Path("/elsewhere"), MOUNTS) == []


def test_the_release_with_this_python() -> None:
    assert image.suite((3, 11)) == "bookworm"
    with pytest.raises(Failed, match=r"Python 3\.12.*3\.11 \(bookworm\)"):
        image.suite((3, 12))


def test_the_result_is_found_among_what_was_logged() -> None:
    assert result('a warning\n{"result": 42}\nanother\n') == 42
    with pytest.raises(Failed, match=r"no result.*\nTraceback"):
        result("Traceback\nOSError")


def test_a_command_that_fails_says_what_it_said() -> None:
    assert run(["sh", "-c", "echo so"]) == "so\n"
    with pytest.raises(Failed, match=r"ended with 3:\nnot so"):
        run(["sh", "-c", "echo not so; exit 3"])
    with pytest.raises(Failed, match="not-there is not there"):
        run(["not-there"])
    with pytest.raises(Failed, match="not within 0 s: it is so"):
        wait_until("it is so", 0, lambda: False)


def test_a_folder_too_long_for_sockets_is_refused() -> None:
    with pytest.raises(Failed, match="shorter --folder"), engine(Path("/" + "long" * 25), "project", [], {}):
        pass


def test_the_job_gives_what_is_expected_and_notes_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "RUNS", str(tmp_path / "runs"))
    numbers = da.arange(3 * job.BLOCK, chunks=job.BLOCK)
    with dask.config.set(scheduler="sync"):
        assert numbers.map_blocks(job.block, dtype=numbers.dtype).sum().compute() == job.expected(3)
    assert sorted(int(line) for line in (tmp_path / "runs").read_text().split()) == [0, job.BLOCK, 2 * job.BLOCK]


def test_the_test_runs_the_file_that_users_run() -> None:
    compose, over = (yaml.safe_load(path.read_text()) for path in FILES)
    assert FILES[0] == ROOT / "docker-compose.yml"
    assert set(compose["services"]) == set(SERVICES) == set(over["services"])
    for service in over["services"].values():
        assert set(service) <= {"healthcheck", "environment"}, "what is run is not what users run"
    for worker in WORKERS:
        assert str(Path(job.RUNS).parent) in compose["services"][worker]["volumes"]
    assert compose["services"]["taskdb"]["image"].endswith("0.1.0}")


def test_scheduler_and_daemon_die_in_both_ways_in_order() -> None:
    assert {(kill.service, kill.by_hand) for kill in KILLS} == {(s, hand) for s in ("scheduler", "taskdb") for hand in (False, True)}
    shares = [kill.share for kill in KILLS]
    assert shares == sorted(shares)
    assert 0 < shares[0] <= shares[-1] < 1
