"""Setup all tests share."""

import os

from hypothesis import HealthCheck, settings

# Machines that run these tests are small and shared: no time limit for one example. In CI a failure must be repeatable.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
