"""Axes of a rule: letters of all its layers, joined where blocks of one layer are used by another."""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction
from typing import Any

from scheduler_adapter.layers import NotARule, Plan
from taskdb.rules import FIXED

Node = tuple[str, Any]


class Axes:
    """Letters of more than one block have an axis. A layer may be coarser on it than another, by a factor.

    Ordered as a depth-first walk from the outputs meets them. Raises NotARule if two letters of one layer are one axis, or one letter is of
    two factors.
    """

    def __init__(self, plans: Collection[Plan]):
        self._plans = {plan.name: plan for plan in plans}
        #: A node's representative, or one nearer to it, and how much coarser than that it is.
        self._parents: dict[Node, tuple[Node, Fraction]] = {}
        for plan in plans:
            self._join(plan)
        finest: dict[Node, Fraction] = {}
        for plan in plans:
            for letter in (*plan.letters, *plan.contracted):
                node, factor = self._find((plan.name, letter))
                finest[node] = min(factor, finest.get(node, factor))
        self._finest = finest
        self.sizes: list[int] = []
        self._numbers: dict[Node, int] = {}
        self._order()
        for plan in plans:
            self._check(plan)

    def of(self, plan: Plan, letter: Any) -> int:
        return self._numbers[self._find((plan.name, letter))[0]] if plan.sizes[letter] > 1 else FIXED

    def factor(self, plan: Plan, letter: Any) -> int:
        """How many indices of the axis one of the letter stands for."""
        if plan.sizes[letter] == 1:
            return 1
        node, factor = self._find((plan.name, letter))
        return int(factor / self._finest[node])

    def _join(self, plan: Plan) -> None:
        for arg in plan.blocks:
            used = self._plans[arg.source]
            for letter, other in zip(arg.letters, used.letters, strict=True):
                # One block is used for all.
                if used.sizes[other] == 1:
                    continue
                this, factor = self._find((plan.name, letter))
                that, other_factor = self._find((used.name, other))
                other_factor = other_factor * arg.ratios.get(letter, 1)
                if this != that:
                    self._parents[this] = that, other_factor / factor
                elif factor != other_factor:
                    raise NotARule(f"layer {plan.name} is of two factors on one axis")

    def _find(self, node: Node) -> tuple[Node, Fraction]:
        """The node that stands for all on an axis, and how much coarser than it this one is."""
        factor = Fraction(1)
        while (found := self._parents.get(node)) is not None:
            parent, ratio = found
            if (above := self._parents.get(parent)) is not None:
                self._parents[node] = found = above[0], ratio * above[1]
            node, factor = found[0], factor * found[1]
        return node, factor

    def _order(self) -> None:
        ended = self._ended()
        # Layers come with dependencies first: the last one has no dependents.
        seen: set[str] = set()
        stack = list(self._plans)
        while stack:
            name = stack.pop()
            if name in seen:
                continue
            seen.add(name)
            plan = self._plans[name]
            # What waits for all of an axis does not follow it.
            for letter in (*sorted(plan.letters, key=lambda x: self._root(plan, x) in ended[plan.name]), *plan.contracted):
                node = self._root(plan, letter)
                if plan.sizes[letter] > 1 and node not in self._numbers:
                    self._numbers[node] = len(self.sizes)
                    self.sizes.append(self._size(node))
            stack.extend(reversed(list(plan.deps)))

    def _root(self, plan: Plan, letter: Any) -> Node:
        return self._find((plan.name, letter))[0]

    def _ended(self) -> dict[str, set[Node]]:
        """Axes all of which a layer's tasks wait for."""
        ended: dict[str, set[Node]] = {}
        for name, plan in self._plans.items():
            contracted = {self._root(plan, letter) for letter in plan.contracted if plan.sizes[letter] > 1}
            ended[name] = contracted.union(*(ended[dep] for dep in plan.deps))
        return ended

    def _size(self, node: Node) -> int:
        return max(
            plan.sizes[letter]
            for plan in self._plans.values()
            for letter in (*plan.letters, *plan.contracted)
            if self._root(plan, letter) == node
        )

    def _check(self, plan: Plan) -> None:
        axes = []
        for letter in (*plan.letters, *plan.contracted):
            if (axis := self.of(plan, letter)) == FIXED:
                continue
            axes.append(axis)
            node, factor = self._find((plan.name, letter))
            factor /= self._finest[node]
            if factor.denominator != 1 or -(-self.sizes[axis] // int(factor)) != plan.sizes[letter]:
                raise NotARule(f"layer {plan.name} has a factor of {factor}")
        if len(set(axes)) != len(axes):
            raise NotARule(f"two axes of layer {plan.name} are one")
