"""Units under `fully_shard` in a world that is not there: their bytes by a second witness, their gathers planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_nets import FEATURES, Transformer, counted, one_of_many, shard
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torchvision.models import resnet18

from lightning_remat import InfeasibleBudgetError, Plan, rematerialize, restore
from lightning_remat.capture.forwards import forward_of
from lightning_remat.measure.cost_model import Speed, assumed_speed
from lightning_remat.regions.step_run import step_peak


class Witness(FSDPMemTracker):
    """PyTorch's own count of what FSDP2 holds; it changes nothing, so that TorchDynamo may capture inside."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def witnessed_bytes(module: nn.Module, x: Tensor) -> int:
    tracker = Witness(module)
    tracker.track_inputs((x,))
    with tracker:
        output = module(x)
        output.backward(torch.ones_like(output))
    for parameter in module.parameters():
        parameter.grad = None
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("make", "sizes", "budget"), [(Transformer, (256, 8), "90%"), (resnet18, (16, 3, 64, 64), "97%")]
)
def test_the_prediction_has_a_second_witness(
    world_size: int, make: Callable[[], nn.Module], sizes: tuple[int, ...], budget: str
) -> None:
    with one_of_many(world_size) as mesh, FakeTensorMode():
        module, x = shard(make(), mesh=mesh), torch.randn(sizes)
        plain_bytes = [step_peak(module, (x,), {}) for _ in range(2)][1]  # the first step makes what others find
        plain_witnessed = witnessed_bytes(module, x)
        made = rematerialize(module, x, memory_budget=budget, planner="periodic")
        assert made.num_recomputed
        assert made.plain.peak_bytes == pytest.approx(plain_bytes, rel=0.02)
        assert made.plain.peak_bytes == pytest.approx(plain_witnessed, rel=0.02)
        assert made.peak_bytes == pytest.approx(step_peak(module, (x,), {}), rel=0.02)
        assert made.peak_bytes == pytest.approx(witnessed_bytes(module, x), rel=0.02)


X_SAMPLES, BUDGET, BANDWIDTH = 64, 320_000, 4e9


def planned(mesh: Any, planner: str, bandwidth: float | None, **options: Any) -> tuple[Plan, int, int]:
    """The plan for the budget, and peak and gathers of a step by it."""
    module, x = shard(Transformer(), mesh=mesh, **options), torch.randn(X_SAMPLES, 8)
    made = rematerialize(module, x, memory_budget=BUDGET, planner=planner, gather_bandwidth=bandwidth)
    with counted(_fsdp_param_group, "foreach_all_gather") as gathers:
        measured = step_peak(module, (x,), {})
    return made, measured, len(gathers)


@pytest.mark.slow
def test_recomputing_and_gathering_planned_together_beat_each_alone() -> None:
    with one_of_many(8) as mesh, FakeTensorMode(), assumed_speed(Speed(1e11, 1e10, 2e-6)):
        together, measured, gathers = planned(mesh, "periodic", BANDWIDTH)
        assert measured == together.peak_bytes <= BUDGET
        alone, _, plain_gathers = planned(mesh, "periodic", None)  # all units resharded, as is FSDP2's default
        assert gathers < plain_gathers == 9  # five units; the outermost is gathered once
        assert together.peak_bytes <= alone.peak_bytes
        with pytest.raises(InfeasibleBudgetError) as all_stay:
            planned(mesh, "periodic", None, reshard_after_forward=False)
        with pytest.raises(InfeasibleBudgetError) as none_recomputed:
            planned(mesh, "keep_all", BANDWIDTH)
    assert all_stay.value.minimum_bytes > measured
    assert none_recomputed.value.minimum_bytes > measured
    assert together.step is not None
    assert together.step.surroundings.gathering is not None
    second = together.step.surroundings.gathering.seconds
    price = second / (gathers - 5)
    assert second == pytest.approx(2 * 7 / 8 * together.step.surroundings.gathering.units[1].full_bytes / BANDWIDTH)
    assert together.step.seconds < alone.simulation.seconds + (plain_gathers - 5) * price


@pytest.mark.slow
def test_all_units_stay_where_there_is_room_and_are_as_before_when_restored() -> None:
    with one_of_many(4) as mesh, FakeTensorMode():
        module, x = shard(Transformer(), mesh=mesh), torch.randn(X_SAMPLES, 8)
        rematerialize(module, x, memory_budget=1 << 40, planner="periodic", gather_bandwidth=1e9)
        for is_restored, number in ((False, 5), (True, 9)):
            if is_restored:
                restore(module)
            with counted(_fsdp_param_group, "foreach_all_gather") as gathers:
                step_peak(module, (x,), {})
            assert len(gathers) == number


@pytest.mark.slow
def test_a_stored_plan_says_which_units_stay() -> None:
    with one_of_many(8) as mesh, FakeTensorMode(), assumed_speed(Speed(1e11, 1e10, 2e-6)):
        made, measured, gathers = planned(mesh, "periodic", BANDWIDTH)
        module, x = shard(Transformer(), mesh=mesh), torch.randn(X_SAMPLES, 8)
        rematerialize(module, x, plan=Plan.from_json(made.to_json()))
        with counted(_fsdp_param_group, "foreach_all_gather") as again:
            assert step_peak(module, (x,), {}) == measured
        assert len(again) == gathers


@pytest.mark.parametrize("bandwidth", [0, -1.0, "fast", True])
def test_a_wrong_bandwidth_is_told(bandwidth: Any) -> None:
    with pytest.raises(ValueError, match="expected bytes a second, 'measure' or None"):
        rematerialize(nn.Linear(2, 2), torch.zeros(2, 2), gather_bandwidth=bandwidth)


@pytest.mark.slow
def test_a_bandwidth_cannot_be_measured_alone() -> None:
    with one_of_many(4) as mesh:
        module = shard(Transformer(), mesh=mesh)
        with pytest.raises(ValueError, match=r"there are none\. Remedy: give bytes a second"):
            rematerialize(module, torch.randn(8, 8), memory_budget="90%", gather_bandwidth="measure")


@pytest.mark.parametrize("both", [False, True])
def test_tensor_parallel_two_by_two_is_refused(both: bool) -> None:
    with one_of_many(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        module = Transformer()
        parallelize_module(module, mesh["tensor_parallel"], {"head": ColwiseParallel()})
        if both:
            fully_shard(module, mesh=mesh["data_parallel"])
        with pytest.raises(ValueError, match=r"tensor parallel.*Remedy"):
            rematerialize(module, torch.randn(8, 8), memory_budget="90%")


@pytest.mark.slow
def test_equal_units_count_the_shards_that_each_has() -> None:
    """The first block is sharded over four processes, the others over two, which share its graph and its profile."""
    with one_of_many(4) as mesh, FakeTensorMode():
        with unset_fake_temporarily():
            two_by_two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        module = Transformer()
        for k, block in enumerate(module.stages[0]):
            fully_shard(block, mesh=two_by_two if k else mesh)
        fully_shard(module, mesh=mesh)
        whole = sum(p.numel() * p.element_size() for p in module.stages[0][0].parameters())
        made = rematerialize(module, torch.randn(X_SAMPLES, FEATURES), memory_budget="90%", planner="periodic")
        assert len({forward_of(block) for block in module.stages[0]}) == 1
    assert made.step is not None
    held = [made.step.plans[key].graph.static_bytes for key in made.step.keys]
    assert held == [whole // 4, whole // 2, whole // 2, whole // 2]
