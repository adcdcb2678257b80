"""LightningModules that nobody thought of train as without the callback, bit by bit, whatever they do."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from random_lightning import RandomLightning, Recipe, recipes
from random_modules import common
from same_runs import assert_same_run, remat


@pytest.mark.slow
def test_the_run_is_the_same(tmp_path_factory: pytest.TempPathFactory) -> None:
    recomputed: list[int] = []

    @settings(common, max_examples=6)
    @given(made=recipes(), planner=st.sampled_from(["auto", "periodic", "chen"]), budget=st.sampled_from([60, 80, 90]))
    def check(made: tuple[Recipe, dict[str, Any]], planner: str, budget: int) -> None:
        recipe, options = made
        note(f"{recipe}")
        ours = remat(planner=planner, memory_budget=f"{budget}%", on_infeasible="minimum", self_check=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # budgets that nothing meets, steps that need more, what is not captured
            folder, factory = tmp_path_factory.mktemp("run"), partial(RandomLightning, recipe)
            result = assert_same_run(folder, factory, callback=ours, is_planned=None, **options).result
        recomputed.append(0 if result is None else result.step.num_recomputed)

    check()
    assert sum(map(bool, recomputed)) >= 4
