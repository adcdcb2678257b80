"""What the executor asks for recomputations beside their kernels is in what is predicted of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_remat import Graph, Node, Plan, rematerialize, simulate
from lightning_remat.execution import rerun_prices as calibration
from lightning_remat.execution.program import Program
from lightning_remat.execution.rerun_prices import RerunPrices, rerun_prices
from lightning_remat.execution.rewriter import programs_in
from lightning_remat.regions import profiles


@pytest.mark.slow
def test_they_are_found_in_what_steps_take(monkeypatch: pytest.MonkeyPatch) -> None:
    told = RerunPrices(run=5e-6, rest=7e-6, own_rest=6e-6, stretch=2e-5, tape=4e-5, hook=3e-6)

    def seconds(program: Program, _: list[Any]) -> float:
        return simulate(told.put_on(program.graph), program.schedule).seconds

    monkeypatch.setattr(calibration, "_seconds", seconds)
    monkeypatch.setattr(calibration, "_measured", calibration._solved)
    assert rerun_prices() == pytest.approx(told)


def test_they_are_measured_once_and_told_for_a_machine_as_fast_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    found = RerunPrices(run=1.0, rest=2.0, own_rest=2.5, stretch=3.0, tape=4.0, hook=5.0)
    solved: list[Any] = []
    seconds = iter([3.0, 0.5, 3.0, 3.0, 3.0, 4.0, 3.0, 2.0, 3.0, 3.0])

    def once() -> Any:
        solved.append(True)
        return found, lambda: next(seconds)

    monkeypatch.setattr(calibration, "_solved", once)
    calibration._measured.cache_clear()
    try:
        assert rerun_prices() == tuple(0.5 * part for part in found)
        assert rerun_prices() == tuple(2.0 * part for part in found)
    finally:
        calibration._measured.cache_clear()
    assert len(solved) == 1


@pytest.mark.parametrize(
    ("slow_rounds", "rounds"),
    [
        (0, 2 * calibration._ROUNDS),
        (1, 2 * calibration._ROUNDS),
        (calibration._ROUNDS + 1, calibration._MOST_ROUNDS),  # until most are past them
        (calibration._MOST_ROUNDS, calibration._MOST_ROUNDS),
    ],
)
def test_rounds_go_on_until_a_slow_minute_is_over(slow_rounds: int, rounds: int) -> None:
    done: list[int] = []

    def disturbed() -> float:
        done.append(len(done))
        return 4.0 - len(done) / calibration._MOST_ROUNDS if done[-1] < slow_rounds else 1.0

    first, other = calibration._ratios_of([lambda: 2.0, disturbed])
    assert len(done) == rounds
    assert first == 1.0
    assert other == 0.5 if slow_rounds < rounds else 1.5 < other < 2.0


def test_minutes_that_are_slow_for_all_contenders_change_nothing() -> None:
    speeds = iter([0.5] * (2 * calibration._ROUNDS - 3) + [1.0] * 3)
    speed = [1.0]

    def first() -> float:
        speed[0] = next(speeds)
        return 2.0 / speed[0]

    assert calibration._ratios_of([first, lambda: 3.0 / speed[0]]) == [1.0, 1.5]
    assert not list(speeds)


@pytest.mark.slow
def test_settings_of_the_first_that_asks_are_not_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def noting(program: Program, values: list[Any]) -> float:
        seen.add((torch.empty(0).device.type, torch.is_autocast_enabled("cpu"), torch.is_anomaly_enabled()))
        return original(program, values)

    original, seen = calibration._seconds, set[tuple[str, bool, bool]]()
    monkeypatch.setattr(calibration, "_seconds", noting)
    calibration._measured.cache_clear()
    try:
        torch.set_default_device("meta")
        with torch.autograd.set_detect_anomaly(True, check_nan=False), torch.autocast("cpu", torch.bfloat16):
            rerun_prices()
    finally:
        torch.set_default_device(None)
        calibration._measured.cache_clear()
    assert seen == {("cpu", False, False)}


@pytest.mark.slow
def test_whoever_asks_meters_nothing_of_it_and_may_infer() -> None:
    rerun_prices()
    with FlopCounterMode(display=False) as flops, torch.inference_mode():
        rerun_prices()
    assert flops.get_total_flops() == 0


@pytest.mark.slow
def test_a_plan_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    run, rest, own_rest, stretch, tape, hook = told = rerun_prices()
    monkeypatch.setattr(profiles, "rerun_prices", lambda: told)
    module = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.LogSigmoid(), nn.LayerNorm(8), nn.Tanh(), nn.Tanh()) for _ in range(8))
    )
    plan = rematerialize(module, torch.randn(512, 8), memory_budget="50%", planner="periodic")
    assert {node.kind: node.num_saved for node in plan.graph.nodes} == {
        "linear": 2,
        "log_sigmoid": 2,
        "layer_norm": 5,
        "tanh": 1,
    }
    assert {node.num_tape_storages for node in plan.graph.nodes if node.kind == "layer_norm"} == {2}
    seen: set[int] = set()
    read = {i for node in plan.graph.nodes for i in node.saved}
    runs = rests = own_rests = stretches = 0
    tapes = 0.0  # in those of layer norms, which are a mean and a deviation
    taped: set[int] = set()
    is_running_again = False
    for kind, n in plan.schedule:
        if kind in "FB":
            is_again = kind == "F" and n in seen
            runs, rests = runs + is_again, rests + (is_again and n in read)
            own_rests += is_again and n in plan.graph.nodes[n].saved
            stretches += is_again and not is_running_again
            is_running_again = is_again
            if kind == "F" and plan.graph.nodes[n].tape_bytes:
                tapes += (is_again and n not in taped) * (1 + plan.graph.nodes[n].num_tape_storages / 2) / 2
                taped.add(n)
            seen.add(n)
        elif kind == "T":
            taped.discard(n)
    own = sum(plan.graph.nodes[n].forward_seconds - plan.graph.nodes[n].recording_seconds for n in _again(plan))
    (program,) = (p.variants[-1] for p in programs_in(module))  # the plan was run once when it was made
    assert stretches
    assert program.hooked
    assert tapes
    assert rests > own_rests > 0
    prices = (
        runs * run
        + rests * rest
        + own_rests * own_rest
        + stretches * stretch
        + tapes * tape
        + len(program.hooked) * hook
    )
    assert plan.simulation.recompute_seconds == pytest.approx(own + prices)


def _again(plan: Plan) -> list[int]:
    runs = [n for kind, n in plan.schedule if kind == "F"]
    return [n for k, n in enumerate(runs) if n in runs[:k]]


def test_an_output_that_a_backward_reads_costs_more_and_most_if_it_is_its_own() -> None:
    prices = RerunPrices(run=1.0, rest=0.5, own_rest=0.25, stretch=2.0, tape=3.0, hook=4.0)
    nodes = (Node("read by itself", saved=(0,)), Node("read by the next"), Node("unread", inputs=(1,), saved=(1,)))
    assert [node.rerun_price for node in prices.put_on(Graph(nodes)).nodes] == [1.75, 1.5, 1.0]


def test_a_tape_costs_more_where_it_is_in_more_storages() -> None:
    prices = RerunPrices(run=1.0, rest=0.5, own_rest=0.25, stretch=2.0, tape=3.0, hook=4.0)
    norm = Node("norm", tape_bytes=8, num_saved=5, num_tape_storages=2)
    few, many = (replace(norm, num_tape_storages=number) for number in (1, 6))
    nothing = replace(norm, tape_bytes=0, num_saved=0, num_tape_storages=0)
    nodes = (norm, few, many, replace(norm, is_random=True), nothing)
    priced = prices.put_on(Graph(nodes)).nodes
    assert [node.tape_price for node in priced] == pytest.approx([3.0, 2.25, 6.0, 3.0, 0.0])
    assert [node.rerun_price for node in priced] == [1.0, 1.0, 1.0, 4.0, 1.0]
    assert [node.hook_price for node in priced] == [4.0, 4.0, 4.0, 4.0, 0.0]
