"""`python -m tests.fuzz.files FOLDER SEED COUNT`: copies of a store with bytes of its file changed are verified, one after the other.

A process of its own, because what LMDB does not bear ends the process. Says at the end how many were found damaged.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from random import Random

from taskdb.cli.progress import Progress
from taskdb.cli.verifying import verify_store
from taskdb.errors import TaskDBError
from taskdb.store.pages import DATA_FILE


def main(folder: Path, seed: str, count: int) -> None:
    found = 0
    for number in range(count):
        random = Random(f"{seed}-{number}")
        copy = folder.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        path = copy / DATA_FILE
        data = bytearray(path.read_bytes())
        for _ in range(random.choice((1, 1, 4, 64))):
            at = random.randrange(len(data))
            data[at] = random.randrange(256)
        if random.random() < 0.2:
            del data[random.randrange(len(data)) :]
        path.write_bytes(data)
        # The last one is what ended the process, if something did.
        print(number, flush=True)
        try:
            found += not verify_store(copy, Progress())["ok"]
        except TaskDBError:
            found += 1
    print("damaged:", found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
