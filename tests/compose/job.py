"""The job of the compose test's client container: `python job.py ADDRESS BLOCKS`. Prints one JSON line.

Each block notes that it ran in a file of its worker's container. Knows nothing of the project: the image's Dask configuration turns on
the preloads.
"""

from __future__ import annotations

import json
import sys

import dask.array as da
import numpy as np
from distributed import Client

#: One line for each time that a block ran, in each worker's container.
RUNS = "/var/lib/dask-worker/runs"
BLOCK = 5


def block(numbers: np.ndarray) -> np.ndarray:
    """One block: slow enough to be killed in."""
    import time

    time.sleep(0.1)
    with open(RUNS, "a") as runs:
        runs.write(f"{int(numbers[0])}\n")
    return numbers + 1


def expected(blocks: int) -> int:
    """The right result."""
    size = blocks * BLOCK
    return size * (size + 1) // 2


def main() -> None:
    address, blocks = sys.argv[1], int(sys.argv[2])
    with Client(address, timeout=60) as client:
        numbers = da.arange(blocks * BLOCK, chunks=BLOCK)
        future = client.compute(numbers.map_blocks(block, dtype=numbers.dtype).sum())
        print(json.dumps({"result": int(future.result(timeout=600))}), flush=True)


if __name__ == "__main__":
    main()
