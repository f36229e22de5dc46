"""What the tasks of the stress run do. Imported by workers, so it imports nothing of ours."""

from __future__ import annotations

import os
import time
from typing import Any

PRIME = 2**61 - 1


class Planned(Exception):
    """The task named in `args[0]` failed, as the model said it would."""


def mix(salt: int, inputs: Any) -> int:
    """The value of a task: differs for every name and every order of inputs."""
    value = salt
    for x in inputs:
        value = (value * 1_000_003 + x + 1) % PRIME
    return value


def step(name: str, salt: int, millis: float, mode: str, failures: int, folder: str, *inputs: int) -> int:
    """`mode`: ok; fail; flaky (fails `failures` times, counted in a file); mark (leaves a file)."""
    if millis:
        time.sleep(millis / 1000)
    if mode == "fail":
        raise Planned(name)
    if mode in ("flaky", "mark"):
        with open(os.path.join(folder, name), "ab") as f:
            f.write(b"x")
            if mode == "flaky" and f.tell() <= failures:
                raise Planned(name)
    return mix(salt, inputs)
