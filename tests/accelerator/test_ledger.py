"""The device of the tests: that it keeps books as devices do, what it alone can tell, and the tests for devices."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerator import ledger
from remat_runs import network
from torch import Tensor

from lightning_remat import rematerialize
from lightning_remat.devices import allocated_bytes, device_name, empty_cache, memory_info, most_bytes, start_counting
from lightning_remat.measure.out_of_memory import is_out_of_memory
from lightning_remat.measure.step_clock import StepClock
from lightning_remat.measure.stopwatch import Stopwatch
from lightning_remat.module_state.own_draws import OwnDraws
from lightning_remat.plans.caching_allocator import Block, CachingAllocator, LimitExceededError

TESTS = Path(__file__).parents[1]
KERNEL_SECONDS = 2e-3
MIB = 2**20


@pytest.fixture
def device(accelerator: torch.device) -> torch.device:
    if accelerator.type != ledger.NAME:
        pytest.skip("of the device of the tests; `pytest --ledger` has it")
    empty_cache(accelerator)
    return accelerator


@pytest.mark.slow
def test_what_is_for_devices_runs_on_this_one() -> None:
    """In a process of its own, that has the device before autograd starts its threads."""
    try:
        ledger.check_tools()
    except ledger.MissingToolError as error:
        pytest.skip(str(error))
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--ledger", "-m", "gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


@pytest.mark.gpu
def test_memory_is_counted_in_blocks_and_kept(device: torch.device) -> None:
    before, (free, total) = allocated_bytes(device), memory_info(device)
    start_counting(device)
    tensor = torch.empty(513, dtype=torch.uint8, device=device)
    assert allocated_bytes(device) == before + 1024
    del tensor
    assert allocated_bytes(device) == before
    assert most_bytes(device) == before + 1024
    assert memory_info(device) == (free, total)  # what the allocator holds unused is free
    assert torch.accelerator.memory_reserved(device) >= before + 1024
    assert device_name(device) == "the tests' device"


@pytest.mark.gpu
def test_memory_runs_out_and_what_is_unused_is_given_up_first(device: torch.device) -> None:
    limit = torch.accelerator.memory_reserved(device) + 20 * MIB
    ledger.set_limit(limit)
    try:
        assert memory_info(device) == (limit - allocated_bytes(device), limit)
        unused = torch.empty(11 * MIB, dtype=torch.uint8, device=device)
        del unused
        whole = torch.empty(20 * MIB, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError, match="LEDGER out of memory") as caught:
            torch.empty(20 * MIB, dtype=torch.uint8, device=device)
        assert is_out_of_memory(caught.value)
        del whole
        assert torch.empty(20 * MIB, dtype=torch.uint8, device=device).numel() == 20 * MIB
    finally:
        ledger.set_limit(ledger.UNLIMITED)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("limit_mib", [None, 96])
def test_the_model_of_the_allocator_reserves_what_the_allocator_reserves(
    device: torch.device, seed: int, limit_mib: int | None
) -> None:
    """Allocations of all sizes that have a rule of their own, in any order, kept for any time."""
    draw, held, memory = random.Random(seed), list[tuple[Tensor, Block | None]](), CachingAllocator()
    del device
    device = torch.device(ledger.NAME, 1)  # on which nothing lives
    gc.collect()
    empty_cache(device)
    assert torch.accelerator.memory_reserved(device) == 0
    if limit_mib is not None:
        memory.limit_bytes = limit_mib * MIB
        ledger.set_limit(limit_mib * MIB, 1)
    failures = 0
    try:
        for _ in range(400):
            if held and draw.random() < 0.45:
                tensor, block = held.pop(draw.randrange(len(held)))
                memory.free(block)
                del tensor
            else:
                size = draw.choice([1, 512, 513, MIB // 2, MIB, MIB + 1, 3 * MIB, 10 * MIB, 11 * MIB, 25 * MIB])
                size = max(1, size - draw.choice([0, 0, draw.randrange(size)]))
                try:
                    block = memory.allocate(size)
                except LimitExceededError:
                    failures += 1
                    with pytest.raises(torch.OutOfMemoryError):
                        torch.empty(size, dtype=torch.uint8, device=device)
                else:
                    held.append((torch.empty(size, dtype=torch.uint8, device=device), block))
            assert memory.reserved_bytes == torch.accelerator.memory_reserved(device)
            assert memory.allocated_bytes == allocated_bytes(device)
        assert bool(failures) == (limit_mib is not None)
    finally:
        held.clear()
        ledger.set_limit(ledger.UNLIMITED, 1)


@pytest.mark.gpu
def test_generators_of_host_and_device_are_two(device: torch.device) -> None:
    torch.manual_seed(3)
    host, on_device = torch.rand(5), torch.rand(5, device=device)
    assert torch.equal(host, on_device.cpu())
    torch.manual_seed(3)
    for draw in (torch.nn.functional.dropout, torch.bernoulli):  # without and with a generator
        draw(torch.full((5,), 0.5, device=device))
    assert torch.equal(torch.rand(5), host)
    assert not torch.equal(torch.rand(5, device=device), on_device)
    state = torch.ledger.get_rng_state(device)
    with OwnDraws() as draws:
        for draw in (torch.nn.functional.dropout, torch.bernoulli):
            draw(torch.full((5,), 0.5, device=device))
    assert draws.num_draws == 2
    assert torch.equal(torch.ledger.get_rng_state(device), state)


@pytest.mark.gpu
def test_a_stopwatch_waits_for_the_device(device: torch.device) -> None:
    x, before = torch.ones(8, 8, device=device), ledger.num_synchronizations()
    with ledger.busy(KERNEL_SECONDS), Stopwatch(device) as watch:
        for _ in range(10):
            x = x + x
        assert not torch.accelerator.current_stream(device).query()  # the host runs ahead
    assert watch.seconds >= 10 * KERNEL_SECONDS
    assert ledger.num_synchronizations() == before + 1


@pytest.mark.gpu
def test_a_steps_seconds_are_those_of_the_device(device: torch.device) -> None:
    clock, x = StepClock(device), torch.ones(8, 8, device=device)
    clock.start()
    with ledger.busy(KERNEL_SECONDS):
        for _ in range(2):
            x = x + x
            clock.count(4)
        reading = clock.read()
    assert reading is not None
    assert reading.step_seconds >= KERNEL_SECONDS
    assert reading.peak_bytes == allocated_bytes(device) + 512


@pytest.mark.gpu
def test_a_planners_seconds_are_those_of_the_device(device: torch.device) -> None:
    module, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).to(device), torch.ones(8, 8, device=device)
    with ledger.busy(KERNEL_SECONDS):
        graph = rematerialize(module, x, memory_budget="100%", planner="periodic").graph
    computed = [node for node in graph.nodes if node.storage_of is None]
    assert computed
    assert all(node.forward_seconds >= KERNEL_SECONDS for node in computed)


@pytest.mark.gpu
def test_a_planned_step_waits_for_the_device_as_often_as_the_plain_one(device: torch.device) -> None:
    module, x = network().to(device), torch.randn(4, 3, 16, 16, device=device)

    def num_waits() -> int:
        before = ledger.num_synchronizations()
        module(x).square().sum().backward()
        return ledger.num_synchronizations() - before

    plain = num_waits()
    rematerialize(module, x, memory_budget="70%", planner="periodic")
    num_waits()  # the first step learns
    assert num_waits() == plain
