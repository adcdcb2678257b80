"""A second witness of peak memory on the CPU: what PyTorch's allocator tells the profiler, compiled code included."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocator_growth(block: Callable[[], object]) -> int:
    """By how many bytes the allocations of the block exceed what was allocated at its start, at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        block()
    results = profiled.profiler.kineto_results  # pyright: ignore
    events = [event for event in results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak
