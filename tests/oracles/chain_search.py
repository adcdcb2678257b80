"""The fastest sequence of a chain by exhaustive search: a shortest path over everything memory can hold.

Written from Table 1 and Definitions 3.1-3.4 and 4.1 of beaumont2024, and sharing no code with the package: a value is
a pair `("a" | "abar" | "delta", index)`, memory is a frozenset of values, and an operation is a row of Table 1.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

Value = tuple[str, int]
Memory = frozenset[Value]


class Step(NamedTuple):
    """One applicable row of Table 1: its name, what it leaves in memory, its time and its memory usage."""

    word: str
    memory: Memory
    seconds: float
    usage: float


def fastest(
    chain: Any,
    budget: float,
    *,
    persistent: bool = False,
    inputs_only: bool = False,
    rewrites: bool = True,
) -> tuple[float, str] | None:
    """(makespan, sequence) of a fastest valid sequence within `budget`; None where there is none.

    Args:
        chain: Anything with `input_bytes` and `stages`, as `lightning_remat.chain.Chain`.
        budget: Bound on the memory usage of every operation.
        persistent: Only the sequences of Definition 4.1.
        inputs_only: Only sequences whose every `Fall` is followed at once by its `B`.
        rewrites: Whether a forward may produce a value that memory holds already.
    """
    return _search(chain, budget, persistent, inputs_only, rewrites)


def lowest_peak(chain: Any, budgets: list[float], **options: bool) -> float | None:
    """The lowest of the sorted `budgets` within which a sequence exists, by bisection."""
    low, high = 0, len(budgets)
    while low < high:
        middle = (low + high) // 2
        if fastest(chain, budgets[middle], **options) is None:
            low = middle + 1
        else:
            high = middle
    return budgets[low] if low < len(budgets) else None


def _search(chain: Any, budget: float, persistent: bool, inputs_only: bool, rewrites: bool) -> tuple[float, str] | None:
    size = _sizes(chain)
    last = len(chain.stages)
    start: tuple[Memory, frozenset[int]] = (frozenset({("a", 0), ("delta", last)}), frozenset())
    if sum(size[v] for v in start[0]) > budget:
        return None
    tie = count()
    heap = [(0.0, next(tie), start, "")]
    settled: set[tuple[Memory, frozenset[int]]] = set()
    while heap:
        makespan, _, state, text = heapq.heappop(heap)
        if state in settled:
            continue
        settled.add(state)
        memory, pending = state
        if ("delta", 0) in memory:
            return makespan, text.strip()
        for step in _steps(chain, size, memory, inputs_only, rewrites):
            if step.usage > budget:
                continue
            now = _persistent_pending(step.word, pending) if persistent else frozenset[int]()
            if now is not None:
                after = (step.memory, now)
                if after not in settled:
                    heapq.heappush(heap, (makespan + step.seconds, next(tie), after, f"{text} {step.word}"))
    return None


def _sizes(chain: Any) -> dict[Value, float]:
    size: dict[Value, float] = {("a", 0): chain.input_bytes, ("delta", 0): chain.input_bytes}
    for index, stage in enumerate(chain.stages, start=1):
        size["a", index] = size["delta", index] = stage.output_bytes
        size["abar", index] = stage.saved_bytes
    return size


def _steps(chain: Any, size: dict[Value, float], memory: Memory, inputs_only: bool, rewrites: bool) -> Iterator[Step]:
    for stage in range(1, len(chain.stages) + 1):
        for rows in (_forward_rows(stage), _backward_rows(stage)):
            for word, needs, gives in rows:
                if not needs <= memory:
                    continue
                new = gives - needs
                if not rewrites and word[0] == "F" and _content(new) & _content(memory - needs):
                    continue
                yield from _apply(chain, size, memory, stage, word, needs, gives, inputs_only)


def _forward_rows(stage: int) -> list[tuple[str, Memory, Memory]]:
    a, abar = ("a", stage - 1), ("abar", stage - 1)
    out, tape = ("a", stage), ("abar", stage)
    return [
        (f"Fall{stage}", frozenset({a}), frozenset({a, tape})),
        (f"Fall{stage}", frozenset({abar}), frozenset({abar, tape})),
        (f"Fck{stage}", frozenset({a}), frozenset({a, out})),
        (f"Fck{stage}", frozenset({abar}), frozenset({abar, out})),
        (f"Fn{stage}", frozenset({a}), frozenset({out})),
    ]


def _backward_rows(stage: int) -> list[tuple[str, Memory, Memory]]:
    a, abar = ("a", stage - 1), ("abar", stage - 1)
    takes, gives = frozenset({("delta", stage), ("abar", stage)}), frozenset({("delta", stage - 1)})
    return [(f"B{stage}", takes | {a}, gives), (f"B{stage}", takes | {abar}, gives | {abar})]


def _content(values: Memory) -> set[int]:
    """The activations whose value is among `values`: a tape holds its stage's output."""
    return {index for kind, index in values if kind != "delta"}


def _apply(
    chain: Any,
    size: dict[Value, float],
    memory: Memory,
    stage: int,
    word: str,
    needs: Memory,
    gives: Memory,
    inputs_only: bool,
) -> Iterator[Step]:
    costs = chain.stages[stage - 1]
    is_forward = word[0] == "F"
    seconds = costs.forward_seconds if is_forward else costs.backward_seconds
    overhead = costs.forward_workspace_bytes if is_forward else costs.backward_workspace_bytes
    after = (memory - needs) | gives
    usage = sum(size[v] for v in memory | gives) + overhead
    if not inputs_only:
        yield Step(word, after, seconds, usage)
    elif word.startswith("Fall"):
        for back, takes, leaves in _backward_rows(stage):
            if takes <= after:
                total = seconds + costs.backward_seconds
                peak = max(usage, sum(size[v] for v in after | leaves) + costs.backward_workspace_bytes)
                yield Step(f"{word} {back}", (after - takes) | leaves, total, peak)
    elif is_forward:
        yield Step(word, after, seconds, usage)


def _persistent_pending(words: str, pending: frozenset[int]) -> frozenset[int] | None:
    """The stages whose `Fck` or `Fall` awaits its `B` after `words`; None where Definition 4.1 forbids them."""
    for word in words.split():
        kind, stage = word.rstrip("0123456789"), int("".join(filter(str.isdigit, word)))
        top = max(pending, default=0)
        if stage < top or (kind == "Fn" and stage in pending):
            return None
        pending = pending - {stage} if kind == "B" else pending | ({stage} if kind in ("Fck", "Fall") else set())
    return pending
