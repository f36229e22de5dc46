"""What a client has said and its scheduler has not acknowledged: kept, so that the next scheduler can be told. Pure bookkeeping.

A message that must not be lost is numbered. The scheduler acknowledges numbers in their order, once what the messages did is on disk.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Collection
from typing import Any

Words = dict[str, Any]

#: Stock's pseudo client for tasks that nobody waits for. Stock ends its wants itself once a task is done.
FIRE_AND_FORGET = "fire-and-forget"
_NUMBERED = {"update-graph", "cancel-keys", "variable_delete", "queue_release", "queue-future-release"}
#: Of no use to another scheduler: a client that comes back says what it wants and what it listens to, and hears what became of it.
_STALE = {
    "client-releases-keys",
    "client-desires-keys",
    "report-key",
    "subscribe-topic",
    "unsubscribe-topic",
    "variable-future-received-confirm",
    "publish_flush_batched_send",
}
#: Bytes of graphs that are searched for the keys of earlier ones; of more it is not known what they need.
SEARCHED_BYTES_MAX = 16 * 2**20


class Outbox:
    def __init__(self, client: str):
        self._client = client
        self._last = 0
        #: Numbered messages that are not acknowledged, oldest first.
        self._kept: deque[Words] = deque()
        #: Others that were said while there was no scheduler.
        self._later: list[Words] = []
        #: Keys that were let go of, oldest first, with the number before it: until it is known that a scheduler has that on disk.
        self._released: dict[Any, int] = {}

    def __len__(self) -> int:
        """Messages that are not acknowledged."""
        return len(self._kept)

    @property
    def leaves_work(self) -> bool:
        """What is fired and forgotten is not acknowledged yet."""
        return any(message["op"] == "client-desires-keys" for message in self._kept)

    def take(self, message: Words, live: bool) -> Words:
        """The message as it is to be sent: numbered, and kept, if it must not be lost. `live`: it will be given to a scheduler now; if not,
        it is kept for the next one as far as that has a use for it."""
        op = message["op"]
        if op == "client-releases-keys":
            for key in message["keys"]:
                self._released.pop(key, None)
                self._released[key] = self._last
        elif op == "client-desires-keys" and message.get("client") != FIRE_AND_FORGET:
            self._wanted(message["keys"])
        for_ever = op == "client-desires-keys" and message.get("client") == FIRE_AND_FORGET
        if op not in _NUMBERED and not for_ever:
            if not live and op not in _STALE:
                self._later.append(message)
            return message
        message = dict(message)
        if op == "update-graph":
            message["taskdb_submission"] = uuid.uuid4().hex
        elif for_ever:
            # Stock's message does not say who sends it.
            message["taskdb_sender"] = self._client
        now = self._keep(message, live)
        if op == "update-graph":
            # Keys may mean other tasks now. What is kept is said to a scheduler that may know the old ones, and nothing of their end.
            self._kept[-1]["taskdb_released"] = list(self._released)
            self._wanted(message["keys"])
        return now

    def _wanted(self, keys: Collection[Any]) -> None:
        for key in keys:
            self._released.pop(key, None)

    def _keep(self, message: Words, live: bool) -> Words:
        self._last += 1
        message["taskdb_number"] = self._last
        self._kept.append(message)
        now = dict(message)
        if live and message["op"] == "update-graph":
            message["taskdb_resent"] = True  # if it is said again
        return now

    def unsaid(self, message: Words) -> None:
        """There was no scheduler, after all, to give what was taken to."""
        if "taskdb_number" not in message and message["op"] not in _STALE:
            self._later.append(message)

    def acknowledged(self, number: int) -> None:
        """Everything up to this number has taken effect, and is on disk."""
        while self._kept and self._kept[0]["taskdb_number"] <= number:
            self._kept.popleft()
        while self._released and self._released[key := next(iter(self._released))] < number:
            del self._released[key]

    def submitted_keys(self) -> set[Any]:
        """Keys of submissions that are not acknowledged."""
        return {key for message in self._kept if message["op"] == "update-graph" for key in message["keys"]}

    def again(self, wanted: Collection[Any]) -> tuple[list[Words], list[Words]]:
        """What the next scheduler is told: submissions, and what is fired and forgotten, before the client says what it wants; the rest
        after that. All are numbered anew, in this order."""
        before, after = self._split(set(wanted))
        self._kept.clear()
        first = [self._keep(message, live=True) for message in before]
        rest = [self._keep(message, live=True) for message in after]
        # That they are not wanted is said after `first`.
        self._released = dict.fromkeys(self._released, self._last)
        later, self._later = self._later, []
        return first, [*rest, *later]

    def _split(self, needed: set[Any]) -> tuple[list[Words], list[Words]]:
        """A cancel can be told only once the wants are; so a key that was cancelled and then submitted again must not be cancelled then.
        What nobody wants any more, nor a later graph names, is not submitted at all."""
        before: list[Words] = []
        after: list[Words] = []
        submitted: set[Any] = set()
        later = _Frames()
        for message in reversed(self._kept):
            op, keys = message["op"], message.get("keys", ())
            if op == "update-graph":
                if not needed.isdisjoint(keys) or later.may_name(keys):
                    before.append(message)
                    submitted.update(keys)
                    later.add(message)
            elif op == "client-desires-keys":
                before.append(message)
                needed.update(keys)
            elif op == "cancel-keys":
                if left := [key for key in keys if key not in submitted]:
                    after.append({**message, "keys": left})
            else:
                after.append(message)
        return before[::-1], after[::-1]

    def clear(self) -> None:
        self._kept.clear()
        self._later.clear()
        self._released.clear()


class _Frames:
    """Graphs as they were pickled. A key that one of them needs stands in it as its text."""

    def __init__(self) -> None:
        self._frames: list[bytes] = []
        self._bytes = 0

    def add(self, message: Words) -> None:
        self._bytes += sum(memoryview(frame).nbytes for frame in message["expr_ser"].frames)
        if self._bytes <= SEARCHED_BYTES_MAX:
            self._frames.extend(bytes(frame) for frame in message["expr_ser"].frames)

    def may_name(self, keys: Collection[Any]) -> bool:
        return self._bytes > SEARCHED_BYTES_MAX or any(text in frame for key in keys for text in _texts(key) for frame in self._frames)


def _texts(key: Any) -> list[bytes]:
    """One of these is to be found wherever the key is pickled, or packed: its text with its length before it, as one key may begin
    another. Of a key that holds no text nothing is known: what is found everywhere."""
    while isinstance(key, tuple) and key:
        key = key[0]
    if not isinstance(key, str):
        return [b""]
    text = key.encode(errors="surrogatepass")
    n = len(text)
    # Pickle, then msgpack, each from the shortest texts to the longest.
    lengths = [n.to_bytes(4, "little"), n.to_bytes(8, "little"), n.to_bytes(4)]
    if n < 2**16:
        lengths.append(n.to_bytes(2))
    if n < 2**8:
        lengths.append(n.to_bytes(1))
    if n < 32:
        lengths.append((0xA0 | n).to_bytes(1))
    return [length + text for length in lengths]
