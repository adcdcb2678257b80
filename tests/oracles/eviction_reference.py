"""Dynamic tensor rematerialization by recursion over sets and dicts, for comparison with the compiled one."""

from collections import Counter

from oracles.schedule_search import gradient_constants

from lightning_remat import Graph


class OutOfMemory(Exception):
    pass


class Eviction:
    """Executes a step of a graph without views; `log` is the schedule, discards between two runs in order."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph, self.budget = graph, budget_bytes
        self.fixed = graph.input_bytes + graph.static_bytes
        self.resident: set[tuple[str, int]] = set()
        self.locks: Counter[tuple[str, int]] = Counter()
        self.used: dict[tuple[str, int], float] = {}
        self.clock = 0.0
        self.log: list[str] = []
        self.ran: set[int] = set()
        self.gone: set[int] = set()
        self.gradients = 0
        # What is still to refer to an output: first runs that read it and backwards that save it.
        self.pending = {("F", k, i) for k, node in enumerate(graph.nodes) for i in node.inputs}
        self.pending |= {("B", k, i) for k, node in enumerate(graph.nodes) for i in node.saved}

    def execute(self) -> list[str]:
        graph = self.graph
        before, most = gradient_constants(graph)
        for n in range(len(graph.nodes)):
            self.make(n, first=True)
            self.ran.add(n)
        for n in reversed(range(len(graph.nodes))):
            self.gradients = before[n]
            node = graph.nodes[n]
            if node.tape_bytes:
                if ("T", n) not in self.resident:
                    self.make(n)
                self.locks["T", n] += 1
                self.collect(n)
            for i in node.saved:
                if ("D", i) not in self.resident:
                    self.make(i)
                self.locks["D", i] += 1
            self.make_room(most[n])
            self.log.append(f"B{n}")
            self.clock += node.backward_seconds
            if node.tape_bytes:
                self.drop(("T", n))
            if n in graph.outputs:
                self.locks["D", n] -= 1
            for i in node.saved:
                self.locks["D", i] -= 1
                self.used["D", i] = self.clock
            self.pending -= {("B", n, i) for i in node.saved}
            self.gone.add(n)
            for i in (*node.saved, n):
                self.collect(i)
        return self.log

    def make(self, n: int, *, first: bool = False) -> None:
        node = self.graph.nodes[n]
        for i in node.inputs:
            if ("D", i) not in self.resident:
                self.make(i)
            self.locks["D", i] += 1
        self.locks["D", n] += 1
        self.locks["T", n] += 1
        self.make_room(self.gradients + node.output_bytes + node.tape_bytes + node.forward_workspace_bytes)
        self.locks["T", n] -= 1
        self.clock += node.forward_seconds
        self.log.append(f"F{n}")
        self.resident |= {("D", n)} | ({("T", n)} if node.tape_bytes else set())
        self.used["D", n] = self.used["T", n] = self.clock
        if not (first and n in self.graph.outputs):
            self.locks["D", n] -= 1
        for i in node.inputs:
            self.locks["D", i] -= 1
            self.used["D", i] = self.clock
        if first:
            self.pending -= {("F", n, i) for i in node.inputs}
        for i in node.inputs:
            self.collect(i)
        if first:
            self.collect(n)

    def collect(self, i: int) -> None:
        value = ("D", i)
        if value in self.resident and not self.locks[value] and all(p[2] != i for p in self.pending):
            self.drop(value)

    def drop(self, value: tuple[str, int]) -> None:
        self.resident.discard(value)
        self.log.append(f"{value[0]}{value[1]}")

    def size(self, value: tuple[str, int]) -> int:
        node = self.graph.nodes[value[1]]
        return node.output_bytes if value[0] == "D" else node.tape_bytes

    def make_room(self, need: int) -> None:
        while self.fixed + need + sum(map(self.size, self.resident)) > self.budget:
            free = [v for v in self.resident if not self.locks[v] and self.size(v)]
            if not free:
                raise OutOfMemory
            self.drop(min(free, key=lambda v: (self.score(v), v[1], v[0])))

    def score(self, value: tuple[str, int]) -> float:
        cost = sum(self.graph.nodes[n].forward_seconds for n in self.neighborhood(value[1]))
        return cost / (self.size(value) * (self.clock - self.used[value] + 1e-12))

    def neighborhood(self, n: int) -> set[int]:
        nodes = self.graph.nodes

        def is_evicted(i: int) -> bool:
            return i in self.ran and i not in self.gone and ("D", i) not in self.resident

        def reach(step):
            found, frontier = set(), {n}
            while frontier:
                frontier = {i for k in frontier for i in step(k) if is_evicted(i)} - found - {n}
                found |= frontier
            return found

        return {n} | reach(lambda k: nodes[k].inputs) | reach(lambda k: self.graph.users[k])
