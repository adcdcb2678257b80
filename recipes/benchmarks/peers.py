"""`auto` beside what PyTorch and others offer, at equal measured peak: one process, the same tensors.

    python recipes/benchmarks/peers.py resnet50 gpt --rounds 7
    python recipes/benchmarks/peers.py --paper-scale      # fake tensors: measured peaks, seconds from operation counts

For each peer's measured peak P, `auto` is planned with the budget P. Steps of plain, peer and `auto` are interleaved,
who goes first changing from round to round; the ratios are medians over the rounds. Each network's rows replace its
former ones in `peers.csv` of the results folder; `README.md` and `peers.png` are written anew from all rows.

Peaks are those of `measure_peak`. Compiled code makes its tensors where that meter does not see them: there the peak is
the allocator's, less what the allocator counts beyond the meter in the plain step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from benchmarks.allocator_peak import allocator_growth
from benchmarks.peer_methods import Peer, Run, peers, rockmate
from benchmarks.peer_networks import NETWORKS
from benchmarks.peer_report import COUNTED, Row, plot, summary, table, write_results
from lightning_remat import Graph, InfeasibleBudgetError, Plan, measure_peak, plan, profile, rematerialize, trace
from lightning_remat.measure.cost_model import CostCounter
from lightning_remat.measure.meter import tensor_storage

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def step(run: Run, x: Tensor) -> None:
    """Forward and backward, by a loss whose backward reads the output as most do."""
    run(x).square().mean().backward()


@dataclass(frozen=True, slots=True)
class Runner:
    """A method set up on a copy of the network of its own."""

    chain: nn.Sequential
    run: Run
    x: Tensor

    def step(self) -> None:
        self.chain.zero_grad(set_to_none=True)
        step(self.run, self.x)

    def seconds(self, clock: Callable[[], float]) -> float:
        """Duration of one step on the CPU."""
        self.chain.zero_grad(set_to_none=True)
        start = clock()
        step(self.run, self.x)
        return clock() - start

    def results(self) -> list[Tensor]:
        """Gradients, then buffers, of a step from the present state."""
        torch.manual_seed(1)
        self.step()
        gradients = [p.grad.clone() for p in self.chain.parameters() if p.grad is not None]
        return [*gradients, *(b.clone() for b in self.chain.buffers())]

    def peak_bytes(self) -> int:
        """By `measure_peak`."""
        self.chain.zero_grad(set_to_none=True)
        with measure_peak(include=[self.chain, self.x]) as measured:
            step(self.run, self.x)
        return measured.peak_bytes

    def allocated_bytes(self) -> int:
        """By the allocator, with all that is there before the step."""
        self.chain.zero_grad(set_to_none=True)
        storages = [tensor_storage(t) for t in (*self.chain.parameters(), *self.chain.buffers(), self.x)]
        return sum(s.nbytes() for s in storages if s is not None) + allocator_growth(lambda: step(self.run, self.x))

    def counted_seconds(self) -> float:
        """Estimated from the operations that a step dispatches, for fake tensors."""
        self.chain.zero_grad(set_to_none=True)
        with CostCounter(torch.device("cpu")) as counter:
            step(self.run, self.x)
        return counter.seconds


@dataclass(frozen=True, slots=True)
class Bench:
    """One network with its input, its plain run and its profile.

    Attributes:
        fresh: Makes the network as it was at the start.
        unplanned_bytes: By how much the measured plain peak exceeds the planned one.
        results: Gradients and buffers of the plain step.
        workspace_bytes: By how much the allocator's plain peak exceeds the measured one.
    """

    name: str
    fresh: Callable[[], nn.Sequential]
    x: Tensor
    graph: Graph
    plain: Runner
    plain_bytes: int
    unplanned_bytes: int
    workspace_bytes: int
    results: list[Tensor]

    @classmethod
    def of(cls, name: str, fresh: Callable[[], nn.Sequential], x: Tensor) -> Bench:
        """Profiles the network and measures its plain step."""
        chain = fresh()
        graph = profile(trace(chain, x), x)
        plain = Runner(chain, chain, x)
        results = plain.results()
        plain_bytes = plain.peak_bytes()
        graph, planned = _with_loss(graph, plain_bytes)
        workspace_bytes = 0 if isinstance(x, FakeTensor) else plain.allocated_bytes() - plain_bytes
        return cls(name, fresh, x, graph, plain, plain_bytes, plain_bytes - planned, workspace_bytes, results)

    def runner(self, apply: Callable[[nn.Sequential, Tensor], Run]) -> Runner:
        """A method on a fresh copy of the network."""
        chain = self.fresh()
        return Runner(chain, apply(chain, self.x), self.x)

    def auto(self, peak_bytes: int) -> Runner | None:
        """`auto` at its best under a measured peak; None where its lowest is higher."""
        budget_bytes, floor_bytes = peak_bytes - self.unplanned_bytes, 0
        while budget_bytes > floor_bytes:
            try:
                made = plan(self.graph, budget_bytes)
            except InfeasibleBudgetError as error:
                floor_bytes = error.sufficient_bytes
                made = plan(self.graph, floor_bytes)
            ours = self.runner(partial(_follow, made))
            excess_bytes = ours.peak_bytes() - peak_bytes
            if excess_bytes <= 0:
                return ours
            budget_bytes = made.peak_bytes - excess_bytes
        return None

    def exactness(self, apply: Callable[[nn.Sequential, Tensor], Run]) -> str:
        """Whether gradients and buffers of a step are bitwise those of the plain one."""
        found = self.runner(apply).results()
        pairs = list(zip(self.results, found, strict=True))
        count = sum(1 for _ in self.plain.chain.parameters())
        wrong = [
            what
            for what, part in (("gradients", pairs[:count]), ("buffers", pairs[count:]))
            if not all(torch.equal(a, b) for a, b in part)
        ]
        return f"{' and '.join(wrong)} differ" if wrong else "yes"


def _with_loss(graph: Graph, plain_bytes: int) -> tuple[Graph, int]:
    """The graph of a step whose plain peak was measured, and the one that is planned for it.

    The loss lies outside the network: what it needs besides is needed at the last backward, right before which it is.
    """
    planned = plan(graph, 1 << 62, "keep_all").peak_bytes
    *others, last = graph.nodes
    needed = last.backward_workspace_bytes + max(0, plain_bytes - planned)
    graph = replace(graph, nodes=(*others, replace(last, backward_workspace_bytes=needed)))
    return graph, plan(graph, 1 << 62, "keep_all").peak_bytes


def _follow(made: Plan, chain: nn.Sequential, x: Tensor) -> Run:
    rematerialize(chain, x, plan=made)
    return chain


def compare(bench: Bench, peer: Peer, rounds: int, clock: str) -> Row:
    """A peer and `auto` under the peer's measured peak, timed in turns."""
    theirs = bench.runner(peer.apply)
    theirs.step()
    allocated_bytes = theirs.allocated_bytes()
    peak_bytes = allocated_bytes - bench.workspace_bytes if peer.is_compiled else theirs.peak_bytes()
    ours = bench.auto(peak_bytes)
    runners = [bench.plain, theirs] + ([] if ours is None else [ours])
    seconds = time_in_turns(runners, rounds, CLOCKS[clock])
    row = Row(
        network=bench.name,
        method=peer.name,
        plain_bytes=bench.plain_bytes,
        peak_bytes=peak_bytes,
        allocated_bytes=allocated_bytes,
        exact=bench.exactness(peer.apply),
        ratio=median_ratio(seconds[1], seconds[0]),
        seconds=f"{clock} clock, threads: {torch.get_num_threads()}, rounds: {rounds}",
    )
    if ours is None:
        return row
    row = row.beside(ours.peak_bytes(), median_ratio(seconds[2], seconds[0]), median_ratio(seconds[1], seconds[2]))
    return replace(row, auto_allocated_bytes=ours.allocated_bytes())


def time_in_turns(runners: list[Runner], rounds: int, clock: Callable[[], float]) -> list[list[float]]:
    """Seconds of the steps of each, one round after the other; the first round only warms up."""
    seconds: list[list[float]] = [[] for _ in runners]
    for k in range(rounds + 1):
        for i in range(len(runners)):
            which = (i + k) % len(runners)
            seconds[which].append(runners[which].seconds(clock))
    return [s[1:] for s in seconds]


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Median of the ratios within each round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def compare_counted(bench: Bench, peer: Peer) -> Row:
    """A peer and `auto` on fake tensors: measured peaks, seconds from operation counts."""
    theirs = bench.runner(peer.apply)
    peak_bytes = theirs.peak_bytes()
    ours = bench.auto(peak_bytes)
    plain_seconds, their_seconds = bench.plain.counted_seconds(), theirs.counted_seconds()
    ratio = their_seconds / plain_seconds
    row = Row(bench.name, peer.name, bench.plain_bytes, peak_bytes, ratio=ratio, seconds=COUNTED)
    if ours is None:
        return row
    seconds = ours.counted_seconds()
    return row.beside(ours.peak_bytes(), seconds / plain_seconds, their_seconds / seconds)


def timed_rows(name: str, rounds: int, clock: str, backend: str | None) -> Iterator[Row]:
    """One network at the size that a CPU measures, every method on it."""
    network = NETWORKS[name]
    torch.manual_seed(0)
    chain = network.build(True)
    bench = Bench.of(name, lambda: copy.deepcopy(chain), network.batch(*network.cpu))
    for peer in peers(bench.plain.chain, backend):
        yield compare(bench, peer, rounds, clock)
    half = bench.plain_bytes // 2
    try:
        yield compare(bench, Peer("rockmate", lambda chain, x: rockmate(chain, x, half), True), rounds, clock)
    except ImportError as error:
        yield Row(name, f"rockmate: cannot be imported ({error})", bench.plain_bytes)


def counted_rows(name: str) -> Iterator[Row]:
    """One network at the scale of the papers, on fake tensors."""
    network = NETWORKS[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        bench = Bench.of(f"{name}, paper scale", lambda: network.build(False), network.batch(*network.paper))
        for peer in peers(bench.plain.chain, None):
            yield compare_counted(bench, peer)


def run(
    folder: Path,
    *,
    networks: Sequence[str],
    rounds: int,
    threads: int,
    clock: str,
    backend: str | None,
    paper_scale: bool,
) -> None:
    """Compares on each network and writes the rows into the folder, every row as soon as it is there.

    Args:
        folder: Of `peers.csv`, `README.md` and `peers.png`.
        networks: Names in `NETWORKS`.
        rounds: Interleaved steps of each method, of which the median counts.
        threads: Of PyTorch; one where the clock is `cpu`, which adds up the time of all.
        clock: `wall`, or `cpu`, which others who compute on the machine disturb less.
        backend: Of `torch.compile`; None leaves it out.
        paper_scale: Fake tensors at the papers' sizes, seconds estimated from operations.
    """
    torch.set_num_threads(threads)
    for name in networks:
        rows: list[Row] = []
        for row in counted_rows(name) if paper_scale else timed_rows(name, rounds, clock, backend):
            rows.append(row)
            every = write_results(folder, rows)
            print(table([row]), flush=True)
        plot(every, folder / "peers.png")
        print(summary(every))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--backend", default="aot_eager_decomp_partition", help="of torch.compile; '' leaves it out")
    parser.add_argument("--paper-scale", action="store_true")
    parser.add_argument("--results", type=Path, default=Path(__file__).resolve().parents[1] / "results" / "peers")
    arguments = vars(parser.parse_args())
    run(arguments.pop("results"), **arguments | {"backend": arguments["backend"] or None})


if __name__ == "__main__":
    main()
