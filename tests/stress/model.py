"""What every future must hold. Knows tasks by name and what was done to them; never looks at the cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.stress.tasks import PRIME, mix


@dataclass(eq=False)
class Node:
    """One task, or (mode `data`) a scattered value."""

    key: Any
    name: str
    salt: int
    millis: float = 0
    mode: str = "ok"
    failures: int = 0
    retries: int = 0
    deps: list[Node] = field(default_factory=list)
    dependents: list[Node] = field(default_factory=list)
    #: Cancelled, or may be for a reason the model does not follow: then it may also hold nothing, but never a wrong value.
    loose: bool = False
    why_loose: str = ""
    #: May fail or not (a flaky task with fewer retries than failures).
    unsure: bool = False
    _value: int | None = None

    def value(self) -> int:
        for node in upwards(self):
            if node._value is None:
                node._value = node.salt if node.mode == "data" else mix(node.salt, [d._value for d in node.deps])
        assert self._value is not None
        return self._value

    def loosen(self, why: str) -> None:
        stack = [self]
        while stack:
            node = stack.pop()
            if not node.loose:
                node.loose = True
                node.why_loose = why
                stack.extend(node.dependents)

    def failing(self) -> tuple[set[str], set[str]]:
        """Names of those at or above it that fail for certain, and that may fail."""
        certain, unsure = set(), set()
        for node in upwards(self):
            if node.mode == "fail":
                certain.add(node.name)
            elif node.mode == "flaky" and (node.failures > node.retries or node.unsure):
                unsure.add(node.name)
        return certain, unsure

    def judge(self, status: str, result: Any) -> str | None:
        """What is wrong with a future of this node, or None. `result`: the value, or the exception."""
        certain, unsure = self.failing()
        if status == "finished":
            if certain and not self.loose:
                return f"finished, but {sorted(certain)} above it fail"
            if result != self.value():
                return f"holds {result!r}, not {self.value()}"
            return None
        if status == "error":
            name = result.args[0] if type(result).__name__ == "Planned" and result.args else None
            if name in certain | unsure or self.loose:
                return None
            return f"failed with {result!r}; of those above it {sorted(certain | unsure) or 'none'} may fail"
        if self.loose:
            return None
        return f"is {status}: {result!r}"


def upwards(node: Node) -> list[Node]:
    """The node and all it depends on, dependencies first."""
    out: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(node, False)]
    while stack:
        current, done = stack.pop()
        if done:
            out.append(current)
        elif current not in seen:
            seen.add(current)
            stack.append((current, True))
            stack.extend((d, False) for d in current.deps if d not in seen)
    return out


class Maker:
    """Makes nodes; every name is new."""

    def __init__(self, rng: Random, tag: str):
        self.rng = rng
        self.tag = tag
        self._count = 0

    def node(self, deps: list[Node], *, group: str = "", mode: str | None = None, retries: int = 0, slow: float = 1.0) -> Node:
        rng = self.rng
        self._count += 1
        name = f"{group or rng.choice(('alpha', 'beta', 'gamma'))}-{self.tag}-{self._count}"
        key: Any = (f"{group}-{self.tag}", self._count) if group else name
        failures = 0
        if mode is None:
            mode = "ok"
            x = rng.random()
            if x < 0.004:
                mode = "fail"
            elif x < 0.02:
                mode, failures = "flaky", rng.randint(1, 3)
        millis = rng.choice((0, 0, 0, 1, 5, 20)) * slow
        node = Node(key, name, rng.randrange(PRIME), millis, mode, failures, retries, list(deps))
        for dep in node.deps:
            dep.dependents.append(node)
            if dep.loose:
                node.loose, node.why_loose = True, dep.why_loose
        return node

    def graph(self, size: int, outside: list[Node], retries: int) -> list[Node]:
        """About `size` nodes of one shape or a mixture, some of them on top of `outside`."""
        rng = self.rng
        shape = rng.choice(("layers", "layers", "hub", "chains", "tree", "random", "roots"))
        slow = rng.choice((0.2, 1, 1, 2))
        group = f"g{rng.randrange(10**6)}"
        out: list[Node] = []

        def new(deps: list[Node], layer: int = 0) -> Node:
            deps = list(dict.fromkeys(deps))
            if outside and rng.random() < 0.1:
                deps = list(dict.fromkeys([*deps, rng.choice(outside)]))
            node = self.node(deps, group=f"{group}.{layer}" if shape != "random" else "", retries=retries, slow=slow)
            out.append(node)
            return node

        def some(nodes: list[Node], most: int) -> list[Node]:
            return rng.sample(nodes, min(len(nodes), rng.randint(1, most)))

        if shape == "layers":
            width = rng.randint(2, max(3, size // 4))
            rows = [[new([]) for _ in range(width)]]
            while len(out) < size:
                above = rows[-1]
                row = []
                for i in range(width):
                    deps = [above[i]] if rng.random() < 0.3 else some(above, 4)
                    if len(rows) > 1 and rng.random() < 0.2:
                        deps.append(rng.choice(rng.choice(rows)))
                    row.append(new(deps, len(rows)))
                rows.append(row)
        elif shape == "hub":
            hub = new([])
            spokes = [new([hub], 1) for _ in range(size - 2)]
            new(spokes if rng.random() < 0.5 else some(spokes, len(spokes)), 2)
        elif shape == "chains":
            ends = []
            chains = rng.randint(1, 8)
            for _ in range(chains):
                end = new([])
                for _ in range(size // chains - 1):
                    end = new([end] if not ends or rng.random() < 0.95 else [end, rng.choice(ends)], 1)
                ends.append(end)
            new(ends, 2)
        elif shape == "tree":
            row = [new([]) for _ in range(size * 2 // 3)]
            layer = 0
            while len(row) > 1:
                layer += 1
                step = rng.randint(2, 5)
                row = [new(row[i : i + step], layer) for i in range(0, len(row), step)]
        elif shape == "random":
            for _ in range(size):
                new([] if not out or rng.random() < 0.2 else some(out[-30:], 3))
        else:
            roots = [new([]) for _ in range(size)]
            if rng.random() < 0.5:
                new(roots, 1)
        return out
