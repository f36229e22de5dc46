"""What is put off: kinds of background work."""

from __future__ import annotations

from enum import IntEnum


class Todo(IntEnum):
    """Kinds of background work, in the order in which they are done. Numbers are stored.

    IMPORTANT: what brings tasks back (UP) comes before what lets go (DOWN), or a result that is still needed would be dropped
    and computed again; cancelling comes before failing, or a client would hear both.
    """

    #: (task, 0): activate it if it is RELEASED and needed.
    UP = 1
    #: (client, task) -> next dependent: end its client's want, go on to its dependents. Ids grow from a task to its dependents,
    #: so in this order each task is met once.
    CANCEL = 2
    #: (graph, 0): what is left of its rule need not be made.
    GROWN = 3
    #: (task, 0) -> next dependent: its dependents fail.
    FAIL = 4
    #: (task, 0) -> next dependent: its ERRED dependents live again.
    REVIVE = 5
    #: (task, 0): clear its error, or those it is blamed on.
    RETRY = 6
    #: (client, 0): remove its wants.
    DROP = 7
    #: (graph, 0) -> next index: its tasks expect no more dependents.
    UNEXPECT = 8
    #: (graph, 0) -> next index: take back what it brought.
    ABORT = 9
    #: (task, 0): release it if it is not needed, forget it if it is not linked.
    DOWN = 10
    #: (graph, 0): remove what is left of a graph without tasks.
    END = 11
    #: (epoch, 0) -> next task: what epochs before this one held is lost, or not begun.
    GIVE_BACK = 12
    #: (graph, 0) -> next index: end all wants of its tasks, so that it is forgotten.
    PRUNE = 13
