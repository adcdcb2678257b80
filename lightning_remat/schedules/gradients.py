"""Gradient memory, which no schedule changes: the backward order is fixed, so its levels are constants."""

from __future__ import annotations

from .graph import Graph


def gradient_levels(graph: Graph, *, is_released: bool = True) -> tuple[list[int], list[int]]:
    """Bytes of gradients before, and at most during, the backward of each node.

    Gradients of activations, parameters and inputs follow from the order of the backwards alone, whatever is kept
    or recomputed. The rules are those of `simulate` with fresh gradients.

    Args:
        graph: The operations.
        is_released: Whether a node's own output and tape end with its backward, as in every schedule after liveness;
            a backward of several operations lets go of them on the way (`Node.backward_release_bytes`).

    Returns:
        Two lists over nodes: the level when the backward of the node starts (0 before the first, since the loss
        makes its gradients with that), and the highest level on the way, parameters and workspace included.
    """
    levels = _Levels(graph, is_released)
    count = len(graph.nodes)
    before, highest = [0] * count, [0] * count
    for n in reversed(range(count)):
        before[n] = levels.alive
        if n == count - 1:
            levels.begin()
        highest[n] = levels.backward(n)
    return before, highest


class _Levels:
    """Storages of gradients, shared where an operation passes its gradient on."""

    def __init__(self, graph: Graph, is_released: bool) -> None:
        self.graph, self.is_released = graph, is_released
        self.alive = 0
        self.storages: list[list[int]] = []  # bytes, holders
        self.gradients: list[list[int]] = [[] for _ in graph.nodes]

    def begin(self) -> None:
        for n in self.graph.ends():
            self.gradients[n].append(self._allocate(self.graph.gradient_bytes(n)))

    def backward(self, n: int) -> int:
        graph, node = self.graph, self.graph.nodes[n]
        if not self.gradients[n]:
            return self.alive
        passed_on = graph.shares_gradient(n)
        excess = node.backward_excess_bytes(
            is_released=self.is_released and n not in graph.outputs,  # those the caller holds
            is_shared=any(self.storages[s][1] > 1 for s in self.gradients[n]),
        )
        contributions: list[tuple[int, int]] = []
        for i in dict.fromkeys(node.inputs):
            if graph.nodes[i].gradient_bytes == 0:
                continue
            if i in passed_on:
                storage = self.gradients[n][0]
                self.storages[storage][1] += 1
            else:
                storage = self._allocate(graph.gradient_bytes(i))
            contributions.append((i, storage))
        self.alive += node.input_gradient_bytes + node.parameter_bytes
        most = self.alive + node.backward_workspace_bytes + excess
        for storage in self.gradients[n]:
            self._release(storage)
        self.gradients[n] = []
        for i, storage in contributions:
            most = max(most, self._accumulate(i, storage))
        return most

    def _accumulate(self, i: int, storage: int) -> int:
        held = self.gradients[i]
        if not held or self.graph.nodes[i].num_outputs > 1:
            held.append(storage)
            return self.alive
        size = self.graph.gradient_bytes(i)
        if self.storages[held[0]] == [size, 1]:
            self._release(storage)
            return self.alive
        total = self._allocate(size)
        most = self.alive
        self._release(held[0])
        self._release(storage)
        held[0] = total
        return most

    def _allocate(self, size: int) -> int:
        self.alive += size
        self.storages.append([size, 1])
        return len(self.storages) - 1

    def _release(self, storage: int) -> None:
        self.storages[storage][1] -= 1
        if not self.storages[storage][1]:
            self.alive -= self.storages[storage][0]
