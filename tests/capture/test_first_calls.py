"""What a model does in its first call alone does not divide the graph that is captured of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_remat import rematerialize


@pytest.mark.slow
def test_a_model_that_was_never_called_is_one_graph() -> None:
    """Segformer's head asks for all hidden states, for which its first call sets hooks under a lock."""
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_sizes": [8, 16, 16, 16], "depths": [1] * 4, "num_attention_heads": [1, 1, 2, 2]}
    config = transformers.SegformerConfig(**sizes, decoder_hidden_size=16, num_labels=3)
    plain = transformers.SegformerForSemanticSegmentation(config).train()
    ours = copy.deepcopy(plain)
    batches = [{"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(0, 3, (2, 64, 64))} for _ in "ab"]
    plan = rematerialize(ours, memory_budget="90%", planner="periodic", **batches[0])
    assert plan.rung == "traced"
    assert plan.num_recomputed
    for batch in batches:
        assert_equal(gradients(plain, batch), gradients(ours, batch))


def gradients(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_equal(expected: dict[str, Tensor | None], found: dict[str, Tensor | None]) -> None:
    for name, gradient in expected.items():
        other = found[name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or other is None or torch.equal(gradient, other), name
