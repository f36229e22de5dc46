"""Setup all tests share."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Machines that run these tests are small and shared: no time limit for one example. In CI a failure must be repeatable.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs in one process, one after another (`--dist loadgroup`): the tests of one shared cluster, or of one file."""
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        group = f"shared-{params['shared']}" if "shared" in params else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
        if item.get_closest_marker("e2e"):
            # Whole clusters on a shared machine: what fails is tried once more, and the summary says so (R).
            item.add_marker(pytest.mark.flaky(reruns=1))
