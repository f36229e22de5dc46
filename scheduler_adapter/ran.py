"""Where and when tasks were computed, for the database's history."""

from __future__ import annotations

from typing import Any

#: Worker, when it began (its clock), seconds.
Run = tuple[str, float, float]


def run_of(message: dict[str, Any]) -> Run | None:
    """Of what stock says of a task that has finished."""
    for part in message["startstops"] or ():
        if part["action"] == "compute":
            return message.get("worker", ""), part["start"], part["stop"] - part["start"]
    return None


def run_columns(runs: list[Run | None]) -> dict[str, Any]:
    """Columns of a Report; none if nothing ran."""
    if not any(runs):
        return {}
    places: dict[str, int] = {}
    filled = [run or ("", 0.0, 0.0) for run in runs]
    return {
        "ran_on": [places.setdefault(worker, len(places) + 1) if worker else 0 for worker, _, _ in filled],
        "began": [began for _, began, _ in filled],
        "seconds": [seconds for _, _, seconds in filled],
        "workers": list(places),
    }
