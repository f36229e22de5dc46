"""When more of a graph whose tasks come as they are needed has to come: rules (`growth.py`) and spooled runs (`spool.py`) alike."""

from __future__ import annotations

from taskdb.engine.transitions import PROCESSING
from taskdb.limits import GROW_QUEUED, GROW_WAITING
from taskdb.store.codec import GraphRecord


def is_hungry(graph: GraphRecord) -> bool:
    """Whether it has few tasks queued."""
    waiting, queued, processing = graph.counts[:PROCESSING]
    # Many may wait for few that nobody takes.
    return queued < GROW_QUEUED and (waiting < GROW_WAITING or not queued + processing)
