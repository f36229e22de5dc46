"""What the zero worker answers to a batch of messages."""

from bench.zero_worker import answers


def test_every_task_is_finished_at_once() -> None:
    replies, asked_to_go = answers([{"op": "compute-task", "key": k, "run_id": i} for i, k in enumerate("ab")], nbytes=7, now=3.0)
    assert [(reply["op"], reply["key"], reply["run_id"], reply["nbytes"]) for reply in replies] == [
        ("task-finished", "a", 0, 7),
        ("task-finished", "b", 1, 7),
    ]
    assert replies[0]["startstops"][0]["start"] == 3.0
    assert not asked_to_go


def test_a_steal_request_comes_too_late() -> None:
    replies, _ = answers([{"op": "steal-request", "key": "a", "stimulus_id": "s"}], nbytes=7, now=3.0)
    assert replies == [{"op": "steal-response", "key": "a", "state": "memory", "stimulus_id": "s"}]


def test_other_messages_need_no_answer_and_close_is_obeyed() -> None:
    assert answers([{"op": "free-keys", "keys": ["a"]}], nbytes=7, now=3.0) == ([], False)
    replies, asked_to_go = answers([{"op": "compute-task", "key": "a", "run_id": 0}, {"op": "close"}], nbytes=7, now=3.0)
    assert len(replies) == 1
    assert asked_to_go
