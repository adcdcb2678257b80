"""What sharded units add to a step, against what FSDP2 does moment by moment, counted by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from lightning_remat.plans.gathering import Event, Gathering, Unit, beside_calls
from lightning_remat.plans.step_memory import Surroundings

BLOCK = Unit(
    full_bytes=80,
    buffer_bytes=80,
    cast_bytes=0,
    kept_bytes=0,
    reduced_bytes=80,
    scattered_bytes=40,
    cast_gradient_bytes=0,
    outside_gradient_bytes=0,
    outside_shard_bytes=0,
)
ROOT = replace(
    BLOCK,
    full_bytes=10,
    buffer_bytes=10,
    kept_bytes=10,
    reduced_bytes=10,
    scattered_bytes=5,
    outside_gradient_bytes=10,
    outside_shard_bytes=5,
)


def two_blocks(root: Unit = ROOT, block: Unit = BLOCK) -> Gathering:
    """A root, which holds layers outside the regions, around two units that are regions."""
    events = [Event("enter", 0, has_gradient=False)]
    for k in (0, 1):
        events += [Event("enter", k + 1), Event("call", k), Event("leave", k + 1)]
    return Gathering((root, block, block), (*events, Event("leave", 0)))


def test_the_gather_of_one_unit_lies_beside_the_buffer_of_the_last_and_the_next() -> None:
    forward, backward = beside_calls(two_blocks(), [80, 80], is_alone=True, is_accumulating=False)
    grads = -5  # the gradients of the root's shards count as resident: not yet there
    # The root's 10 stay; a unit has parameters and, until the next gather, the buffer that they were copied from.
    assert [b.level_bytes for b in forward] == [grads + 10 + 80 + 80] * 2
    # The second gather's buffer is there before the first one's goes.
    assert forward[0].after_bytes == forward[1].before_bytes == grads + 10 + 80 + 80
    # In the backward of the second unit the first is gathered ahead, and the root has its gradients.
    assert backward[0].level_bytes == grads + 10 + 10 + 80 + 80
    assert backward[0].before_bytes == grads + 10 + 10 + 80 + 80  # its parameters beside its own buffer
    # Then its gradients lie beside what is reduced, which stays; 40 of it are those of the shards.
    assert backward[0].after_bytes == max(grads + 20 + 80 + 80 + 80, grads + 20 + 40 + 80 + 80 + 80)
    assert backward[1].level_bytes == grads + 40 + 20 + 80 + 80  # retained, and gathered ahead before
    assert backward[1].after_bytes == grads + 40 + 20 + 80 + 80


def test_a_unit_that_stays_is_gathered_once() -> None:
    stays = replace(BLOCK, kept_bytes=80)
    forward, backward = beside_calls(two_blocks(block=stays), [80, 80], is_alone=True, is_accumulating=False)
    assert forward[1].level_bytes == -5 + 10 + 80 + 80 + 80
    assert backward[0].level_bytes == -5 + 10 + 10 + 80 + 80


def test_what_was_received_last_may_lie_beside_the_next_copy() -> None:
    held = replace(two_blocks(), holds_received=True)
    forward, backward = beside_calls(held, [80, 80], is_alone=True, is_accumulating=False)
    plain, plain_backward = beside_calls(two_blocks(), [80, 80], is_alone=True, is_accumulating=False)
    # The root's parameters, both buffers and the second unit's parameters.
    assert forward[1].before_bytes == forward[0].after_bytes == -5 + 10 + 80 + 80 + 80
    assert [b.level_bytes for b in forward] == [b.level_bytes for b in plain]
    assert backward == plain_backward  # there it is let go of after each copy


def test_gradients_of_shards_stay_where_they_are_summed() -> None:
    _, once = beside_calls(two_blocks(), [80, 80], is_alone=False, is_accumulating=False)
    _, summed = beside_calls(two_blocks(), [80, 80], is_alone=False, is_accumulating=True)
    assert summed[0].level_bytes - once[0].level_bytes == 40 + 40 + 5
    assert summed[1].level_bytes - once[1].level_bytes == 40 + 5


def test_survives_json() -> None:
    for gathering in (two_blocks(), replace(two_blocks(), holds_received=True)):
        around = Surroundings(7, 9, gathering=gathering)
        assert Surroundings.from_dict(json.loads(json.dumps(asdict(around)))) == around
    assert Surroundings.from_dict(asdict(Surroundings(7, 9))) == Surroundings(7, 9)
