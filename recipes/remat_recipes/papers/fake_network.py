"""A network of a paper at the paper's own size on fake tensors: nothing is allocated, everything is counted."""

from dataclasses import replace

from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.paper_scale import PaperNetwork
from benchmarks.peaks import measured_peak
from lightning_remat import Graph, InfeasibleBudgetError, Plan, Schedule, plan, profile, rematerialize, restore, trace

UNLIMITED_BYTES = 1 << 62
HOW_SECONDS = {True: "measured on the CPU at a small batch and scaled", False: "estimated from operation counts"}


class FakeNetwork:
    """Its graph, and the peak that a meter sees when a rewritten step runs.

    Attributes:
        graph: The operations: bytes exact, seconds estimated from operation counts or measured at a small batch.
        plain: The step without recomputation.

    Args:
        network: What to build and at which size.
        measured: Whether to measure the seconds, on real tensors at the small batch, and scale them.
    """

    def __init__(self, network: PaperNetwork, *, measured: bool = False) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        with self._mode:
            self._module, self._batch = network.build(), network.batch(network.batch_size)
            self.graph = profile(trace(self._module, self._batch), self._batch)
        if measured:
            self.graph = network.with_measured_seconds(self.graph)
        self.plain = plan(self.graph, UNLIMITED_BYTES, "keep_all")

    def metered_bytes(self, made: Plan) -> int:
        """The peak of a step that really runs by the plan, on fake tensors."""
        with self._mode:
            rematerialize(self._module, self._batch, plan=made)
            try:
                return measured_peak(self._module, self._batch)
            finally:
                restore(self._module)


def replayed(graph: Graph, schedule: Schedule, name: str = "") -> Plan:
    """The schedule as a plan of that name, at whatever peak it has."""

    def propose(*_: object) -> Schedule:
        return schedule

    propose.__name__ = name
    return plan(graph, UNLIMITED_BYTES, propose)


def planned(graph: Graph, budget_bytes: int, planner: str, effort: float = 1.0) -> Plan:
    """The planner's plan; the effort is that of `auto`.

    Raises:
        InfeasibleBudgetError: The planner finds none.
    """
    return plan(graph, budget_bytes, planner, **({"effort": effort} if planner == "auto" else {}))


def lowest(graph: Graph, planner: str, effort: float = 1.0) -> Plan:
    """The planner's plan for the lowest peak that it reaches."""
    try:
        return planned(graph, 0, planner, effort)
    except InfeasibleBudgetError as error:
        return planned(graph, error.sufficient_bytes, planner, effort)


def without_parameters(graph: Graph) -> Graph:
    """The graph without parameters, buffers and parameter gradients, which no schedule changes: features alone."""
    return replace(graph, static_bytes=0, nodes=tuple(replace(n, parameter_bytes=0) for n in graph.nodes))
