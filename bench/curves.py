"""Figures over the size of a graph, as one picture, from files of `compare --json`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.figures import SIDES

#: Name of a figure, what is written above its panel, and what one unit of it is.
PANELS = (
    ("submission_s", "until it is taken in, s", 1.0),
    ("scheduler_rss_growth_bytes", "growth of the scheduler's memory, MiB", 2**20),
    ("stall_max_s", "longest stall of its loop, s", 1.0),
)
_STYLES = {"stock": {"color": "#b8442e", "marker": "o"}, "ours": {"color": "#2a6f97", "marker": "s"}}


def points(contents: Iterable[dict[str, Any]]) -> dict[str, dict[int, dict[str, float | None]]]:
    """Medians by side and by the number of tasks asked for, in growing order. A later file replaces an earlier one of its size and side."""
    found: dict[str, dict[int, dict[str, float | None]]] = {side: {} for side in SIDES}
    for content in contents:
        for side, median in content["medians"].items():
            found[side][content["options"]["tasks"]] = median
    return {side: dict(sorted(by_size.items())) for side, by_size in found.items()}


def draw(contents: list[dict[str, Any]], file: Path) -> None:
    """Write the picture; its kind follows from the file's suffix. Raises ValueError if the files are of several workloads."""
    import matplotlib

    matplotlib.use("agg")
    # The same figures give the same file.
    matplotlib.rcParams["svg.hashsalt"] = "taskdb"
    from matplotlib import pyplot

    workloads = {content["workload"] for content in contents}
    if len(workloads) != 1:
        raise ValueError(f"one picture shows one workload, not {len(workloads)}: {', '.join(sorted(workloads))}")
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3.2), layout="constrained")
    for axis, (name, title, unit) in zip(axes, PANELS, strict=True):
        for side, by_size in points(contents).items():
            known = [(size, value / unit) for size, median in by_size.items() if (value := median.get(name))]
            if known:
                axis.plot(*zip(*known, strict=True), label=side, **_STYLES[side])
        axis.set(xscale="log", yscale="log", title=title, xlabel="tasks")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(f"{workloads.pop()}, zero workers")
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    pyplot.close(figure)
