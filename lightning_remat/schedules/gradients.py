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
    memory = GradientMemory(graph)
    count = len(graph.nodes)
    before, highest = [0] * count, [0] * count
    for n in reversed(range(count)):
        before[n] = memory.alive
        if n == count - 1:
            memory.begin_backward()
        highest[n] = memory.propagate(n, is_released=is_released and n not in graph.outputs)  # those the caller holds
    return before, highest


class GradientMemory:
    """The rules of gradients: which are made, passed on, added up and let go of.

    A *storage* is a number; gradients that an operation passes on share one.

    Args:
        graph: The operations.
        is_fresh: Whether gradients of parameters appear with their backward, to stay; else they are there already,
            and what a backward adds to them is transient.

    Attributes:
        alive: Bytes of what is counted.
        sizes: Bytes of each storage.
        holders: How many live in each storage.
        gradient: For each node the storages of the gradient of its output.
    """

    def __init__(self, graph: Graph, *, is_fresh: bool = True) -> None:
        self.graph, self.is_fresh = graph, is_fresh
        self.alive = 0
        self.sizes: list[int] = []
        self.holders: list[int] = []
        self.gradient: list[list[int]] = [[] for _ in graph.nodes]

    def allocate(self, size: int) -> int:
        """A new storage with one holder."""
        self.alive += size
        self.sizes.append(size)
        self.holders.append(1)
        return len(self.sizes) - 1

    def release(self, storage: int) -> None:
        """One holder goes."""
        self.holders[storage] -= 1
        if not self.holders[storage]:
            self.alive -= self.sizes[storage]

    def new_gradient(self, n: int) -> int:
        """The storage of a new gradient of the output of node n."""
        return self.allocate(self.graph.gradient_bytes(n))

    def begin_backward(self) -> int:
        """The loss makes the gradients of all that leaves the graph; what is alive then."""
        for n in self.graph.ends():
            self.gradient[n].append(self.new_gradient(n))
        return self.alive

    def receivers(self, n: int) -> list[int]:
        """The inputs that the backward of node n makes gradients of."""
        inputs = dict.fromkeys(self.graph.nodes[n].inputs)
        return [i for i in inputs if self.graph.nodes[i].gradient_bytes != 0]

    def propagate(self, n: int, *, is_released: bool) -> int:
        """Gradients of inputs and parameters appear, that of the output goes; the most alive on the way."""
        if not self.gradient[n]:
            return self.alive
        graph, node = self.graph, self.graph.nodes[n]
        passed_on = graph.shares_gradient(n)
        is_shared = any(self.holders[s] > 1 for s in self.gradient[n])
        excess = node.backward_excess_bytes(is_released=is_released, is_shared=is_shared)
        contributions: list[tuple[int, int]] = []
        for i in self.receivers(n):
            if i in passed_on:
                storage = self.gradient[n][0]
                self.holders[storage] += 1
            else:
                storage = self.new_gradient(i)
            contributions.append((i, storage))
        self.alive += node.input_gradient_bytes
        most = self.alive + node.parameter_bytes + node.backward_workspace_bytes + excess
        if self.is_fresh:
            self.alive += node.parameter_bytes
        for storage in self.gradient[n]:
            self.release(storage)
        self.gradient[n] = []
        for i, storage in contributions:
            if self.gradient[i] and graph.nodes[i].num_outputs == 1:
                most = max(most, self.add(i, storage))
            else:
                self.gradient[i].append(storage)
                most = max(most, self.alive)
        return most

    def add(self, i: int, storage: int) -> int:
        """Adds a contribution to the gradient of node i as autograd does; the most alive meanwhile."""
        held = self.gradient[i]
        if self.holders[held[0]] == 1 and self.sizes[held[0]] == self.graph.gradient_bytes(i):
            self.release(storage)  # added in place
            return self.alive
        total = self.new_gradient(i)
        most = self.alive
        self.release(held[0])
        self.release(storage)
        held[0] = total
        return most
