"""No step after the first reads a tensor's value on the host: what a CUDA graph could not record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting import recomputing_copy
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat.execution.rewriter import watched

READS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
"""Of operations whose result, or its size, the host waits for."""


class ReadOnTheHost(AssertionError):
    """An operation has read a value."""


class NoReads(TorchDispatchMode):
    """Fails where an operation reads a value on the host."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # rewritten modules run by their programs inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(tag in func.tags for tag in READS):
            raise ReadOnTheHost(func.name())
        return func(*args, **(kwargs or {}))


class Attention(nn.Module):
    """A block of a transformer with dropout at all its places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.all, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.all(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return x + nn.functional.dropout(self.out(h.transpose(1, 2).flatten(2)), 0.1)


class Recurrent(nn.Module):
    """An LSTM as one operation, and the same as many."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.cell = nn.LSTM(8, 8, batch_first=True), nn.LSTMCell(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.whole(x)
        state = (h[:, 0], h[:, 1])
        for k in range(3):
            state = self.cell(h[:, k], state)
        return state[0]


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), (4, 8)),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.AlphaDropout(), nn.ELU()),
        (4, 8),
    ),
    "batch norm": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)),
        (2, 3, 8, 8),
    ),
    "attention": (lambda: nn.Sequential(Attention(), Attention()), (2, 4, 8)),
    "recurrent": (Recurrent, (2, 4, 8)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", NETWORKS)
def test_no_step_after_the_first_reads_a_value(name: str) -> None:
    make, shape = NETWORKS[name]
    x = torch.randn(shape)
    for kept in ((), (1, 2)):
        ours = recomputing_copy(make(), x, kept=kept)
        ours(x).sum().backward()
        for _ in range(2):
            with watched(ours) as ran, NoReads():
                ours(x).sum().backward()
            assert ran, "by its program"


def test_a_read_would_be_found() -> None:
    with NoReads():
        for read in (Tensor.item, bool, torch.nonzero, torch.unique):
            with pytest.raises(ReadOnTheHost):
                read(torch.ones(1))
