from __future__ import annotations

import pytest
from chain_examples import TOY, TOY_SEQUENCE, chains, homogeneous, plain_peak
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.chain_search import fastest

from lightning_remat.chain import Chain, ChainSequence, Operation, Stage, memory_usages, replay
from lightning_remat.errors import ScheduleError


def test_the_papers_toy_example_has_its_printed_figures():
    assert replay(TOY, TOY_SEQUENCE) == pytest.approx((47.42, 86.75), abs=1e-9)
    plain = " ".join([f"Fall{i}" for i in range(1, 8)] + [f"B{i}" for i in range(7, 0, -1)])
    assert replay(TOY, plain) == pytest.approx((37.38, 106.99), abs=1e-9)
    usages = memory_usages(TOY, ChainSequence.parse(plain))
    assert plain.split()[usages.index(max(usages))] == "B5"


def test_text_form_round_trips():
    sequence = ChainSequence.parse(TOY_SEQUENCE)
    assert str(sequence) == TOY_SEQUENCE
    assert ChainSequence.parse(str(sequence)) == sequence
    assert sequence.operations[:2] == (Operation("Fck", 1), Operation("Fn", 2))
    assert len(sequence) == len(list(sequence)) == 19


@pytest.mark.parametrize("text", ["Fck1 F2", "Fck1 Fall0", "Fck1 Fall", "Fck1 b1", "Fck1 B01", "Fck1 Fall1B1"])
def test_a_word_that_is_no_operation_is_marked(text: str):
    with pytest.raises(ScheduleError, match="is not an operation") as error:
        ChainSequence.parse(text)
    assert error.value.position == 1
    assert str(error.value).splitlines()[1] == " " * 5 + "^" * len(text.split()[1])


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("Fall1 Fall2 Fall3 B3 B2", 5, "ends before B1"),
        ("Fall1 Fall2 Fall3 B2 B3 B1", 3, "delta.2 is not in memory: delta.3 is"),
        ("Fck1 Fall2 Fall3 B3 B2 B1", 5, "abar.1 is not in memory: run Fall1 first"),
        ("Fn1 Fall2 Fall3 B3 B2 Fall1 B1", 5, "its input a.0 is not in memory"),
        ("Fall1 Fn2 Fall3 B3 B2 B1", 1, "abar.1 is, but Fn takes a.1"),
        ("Fall2", 0, "its input a.1 is not in memory"),
        ("Fall1 Fall2 Fall3 Fall4", 3, "the chain has 3 stages"),
        ("Fall1 Fall2 Fall3 B3 B2 B1 B1", 6, "its input a.0 is not in memory"),
        ("", 0, "ends before B3"),
    ],
)
def test_an_invalid_sequence_is_refused_at_the_operation(text: str, position: int, reason: str):
    with pytest.raises(ScheduleError, match=reason) as error:
        replay(homogeneous(3), text)
    assert error.value.position == position


def test_memory_counts_inputs_outputs_and_overhead_of_each_operation():
    chain = Chain(1, (Stage(10, 100, 1, 1, 1000, 0), Stage(20, 200, 1, 1, 0, 2000)))
    usages = memory_usages(chain, ChainSequence.parse("Fck1 Fall2 B2 Fall1 B1"))
    # delta^2 weighs 20 from the start.
    assert usages == [1 + 20 + 10 + 1000, 1 + 20 + 10 + 200, 1 + 20 + 10 + 200 + 10 + 2000, 1 + 10 + 100 + 1000, 112]


def test_sizes_with_decimals_add_up_without_rounding():
    chain = Chain(0.1, (Stage(0.1, 0.2, 1, 1), Stage(0.3, 0.1, 1, 1)))
    assert replay(chain, "Fall1 Fall2 B2 B1").peak == 0.8
    assert isinstance(replay(homogeneous(2), "Fall1 Fall2 B2 B1").peak, int)


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf")])
def test_a_cost_must_be_finite_and_not_negative(bad: float):
    with pytest.raises(ValueError, match="finite and not negative"):
        Stage(1, 1, 1, bad)
    with pytest.raises(ValueError, match="finite and not negative"):
        Chain(bad, (Stage(1, 1, 1, 1),))
    with pytest.raises(ValueError, match="at least one stage"):
        Chain(1, ())


@given(chains(max_stages=4), st.floats(0.4, 1.0), st.booleans())
@settings(deadline=None, max_examples=60)
def test_replay_agrees_with_the_search(chain: Chain, fraction: float, inputs_only: bool):
    budget = int(fraction * plain_peak(chain))
    found = fastest(chain, budget, inputs_only=inputs_only, rewrites=False)
    if found is not None:
        makespan, text = found
        assert replay(chain, text).makespan == makespan
        peak = replay(chain, text).peak
        assert peak <= budget
        # The search finds the sequence's makespan at its peak, and nothing that fast one below but another sequence.
        again = fastest(chain, peak, inputs_only=inputs_only, rewrites=False)
        assert again is not None
        assert again[0] == makespan
