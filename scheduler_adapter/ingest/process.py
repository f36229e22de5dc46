"""The ingest process: a server that forks one child a submission. Run as `python -m scheduler_adapter.ingest.process SOCKET`.

The server has Dask imported and nothing else to do, so a child starts in milliseconds, gives all its memory back when it ends, and takes
nobody with it if it crashes. The server ends when its standard input does (its scheduler is gone), and its children with it.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import threading
import traceback
from typing import Any

from scheduler_adapter.ingest.frames import receive, send


def main(path: str) -> None:
    # What graphs are made of; imported once, before any fork.
    for name in ("dask.array", "dask.dataframe", "dask.bag", "distributed.client", "distributed.shuffle", "grpc", "taskdb.client"):
        try:
            importlib.import_module(name)
        except ImportError:
            pass
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin, selectors.EVENT_READ)
    try:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _end(path)
    while True:
        for event, _ in selector.select():
            if event.fileobj is not listener:
                if not os.read(sys.stdin.fileno(), 1024):
                    _end(path)
                continue
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                try:
                    work(connection)
                finally:
                    os._exit(0)
            connection.close()


def _end(path: str) -> None:
    """The scheduler is gone; if it was killed, nobody else removes its folder."""
    shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def work(connection: socket.socket) -> None:
    """One submission, from the job on the socket to `done` or `error`."""
    os.nice(5)
    # A graph is many objects that all stay, and this process ends with it: looking for cycles among them took most of the time of reading.
    gc.disable()
    try:
        meta, frames = receive(connection)
        # The scheduler hangs up when the submission is cancelled, or dies.
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        ingest(pickle.loads(meta), frames, lambda **message: send(connection, pickle.dumps(message)))
    except BaseException as e:
        error = e if isinstance(e, Exception) and _picklable(e) else RuntimeError(f"{type(e).__name__}: {e}")
        send(connection, pickle.dumps({"op": "error", "exception": error, "text": traceback.format_exc()}))


def _picklable(e: BaseException) -> bool:
    try:
        pickle.loads(pickle.dumps(e))
        return True
    except Exception:
        return False


def _end_with(connection: socket.socket) -> None:
    try:
        connection.recv(1)
    finally:
        os._exit(1)


def ingest(job: dict[str, Any], frames: list[Any], tell: Any) -> None:
    """Unpickle, optimise, order and stream one graph. `tell(op=…)` reports to the scheduler."""
    import dask
    from distributed.protocol.serialize import Serialized

    from scheduler_adapter.dask_internals import load_expr
    from scheduler_adapter.details import unpack
    from scheduler_adapter.expand import expand
    from scheduler_adapter.graph import estimate_tasks, pack_graph, prepare
    from scheduler_adapter.ingest.stream import Stream
    from scheduler_adapter.symbolic import compile_rule

    for entry in reversed(job["sys_path"]):
        if entry not in sys.path:
            sys.path.insert(0, entry)
    dask.config.update(dask.config.config, job["config"], priority="new")
    expr = load_expr(Serialized(job["header"], frames))
    frames.clear()
    keys, internal_priority, annotations = unpack(job["details"])
    estimate = estimate_tasks(expr)
    if estimate is None or estimate >= job["rule_tasks"]:
        rule = compile_rule(expr, keys, annotations, internal_priority)
        if rule is not None and rule.rule.tasks >= job["rule_tasks"]:
            Stream(job, rule.rest, tell, rule).run()
            return
        del rule
    dsk, by_type = expand(expr)
    del expr
    graph = prepare(dsk, by_type, keys, internal_priority, annotations)
    del dsk
    if graph.has_p2p:
        # The scheduler looks at the shuffle as a unit.
        tell(op="whole", graph=pack_graph(graph))
        return
    Stream(job, graph, tell).run()


if __name__ == "__main__":
    main(sys.argv[1])
