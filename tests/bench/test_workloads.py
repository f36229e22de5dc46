"""Each workload can be built, has about the size that was asked for, and gives the right answer."""

import time
from collections.abc import Iterator

import pytest
from distributed import Client

from bench import probe
from bench.workloads import WORKLOADS, TaskFailed, WrongAnswer, check, settle

TASKS = 250
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with Client(processes=False, n_workers=1, threads_per_worker=2, dashboard_address=None) as client:
        client.run_on_scheduler(probe.install)
        yield client


@pytest.mark.parametrize("name", WORKLOADS)
def test_size_and_answer(client: Client, name: str) -> None:
    job = WORKLOADS[name].build(TASKS)
    deadline = time.monotonic() + 10
    while client.run_on_scheduler(probe.tasks_resident):
        assert time.monotonic() < deadline, "tasks of the test before are still there"
        time.sleep(0.01)
    client.run_on_scheduler(probe.reset)
    futures = job.run(client, True)
    readings = probe.Readings(*client.run_on_scheduler(probe.read))
    assert 0.6 * TASKS <= readings.tasks_finished <= 1.4 * TASKS
    assert readings.tasks_erred == 0
    assert readings.worker_bytes_max > 0
    assert readings.first_start is not None
    assert 0 < readings.tasks_resident_max <= readings.tasks_finished
    check(client.gather(futures), job.expected())


def test_a_failing_task_is_an_error(client: Client) -> None:
    with pytest.raises(TaskFailed, match="ZeroDivisionError"):
        settle([client.submit(lambda: 1 / 0, pure=False)])


def test_a_wrong_answer_is_an_error() -> None:
    check([1, 2.0], [1.0, 2.0 + 1e-12])
    with pytest.raises(WrongAnswer):
        check([1, 2], [1, 3])
    with pytest.raises(WrongAnswer):
        check([1, 2], [1, 2, 3])
