"""Hooks, attributes and parameters that a user adds or changes around a rewritten module: respected or noticed."""

from __future__ import annotations

import copy

import pytest
import torch
from rewriting import recomputing_copy, rewrite
from torch import Tensor, nn
from uses import X, chain, same

from lightning_remat import rematerialize


@pytest.mark.slow
def test_hooks_of_every_kind_fire_as_often_as_in_the_plain_run() -> None:
    counts: list[list[str]] = []
    plain = chain()
    for is_ours in (False, True):
        m, calls = copy.deepcopy(plain), []
        counts.append(calls)
        for name, layer in (("block", m[1]), ("linear", m[2][0]), ("norm", m[2][2]), ("root", m)):
            layer.register_forward_pre_hook(lambda *_, n=name, c=calls: c.append(f"{n} pre"))
            layer.register_forward_hook(lambda *_, n=name, c=calls: c.append(f"{n} post"))
        for name, p in m.named_parameters():
            p.register_hook(lambda _, n=name, c=calls: c.append(f"{n} gradient"))
            p.register_post_accumulate_grad_hook(lambda _, n=name, c=calls: c.append(f"{n} accumulated"))
        if is_ours:
            rewrite(m, (), X)
            assert not calls
        for _ in range(2):
            m(X.clone().requires_grad_()).sum().backward()
    assert sorted(counts[0]) == sorted(counts[1])
    assert len(counts[0]) > 20


@pytest.mark.slow
def test_hooks_of_a_backward_fire_as_often_beside_the_parts_that_are_rewritten() -> None:
    x, counts = torch.randn(256, 6).requires_grad_(), []
    plain = nn.Sequential(nn.Sequential(*(nn.Sigmoid() for _ in range(2)), nn.Linear(6, 6)), wide(), wide())
    for is_ours in (False, True):
        m, calls = copy.deepcopy(plain), []
        counts.append(calls)
        m[0].register_full_backward_pre_hook(lambda *_, c=calls: c.append("backward pre"))
        m[0].register_full_backward_hook(lambda *_, c=calls: c.append("backward"))
        if is_ours:
            made = rematerialize(m, x, memory_budget=1 << 30, planner="periodic")
            made = rematerialize(m, x, memory_budget=made.plain.peak_bytes - 1, planner="periodic")
            assert made.num_recomputed
            calls.clear()
        for _ in range(2):
            m(x.clone().requires_grad_()).sum().backward()
    assert sorted(counts[0]) == sorted(counts[1])
    assert len(counts[0]) == 4


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), *(nn.Sigmoid() for _ in range(4)))


@pytest.mark.slow
def test_what_hooks_change_and_keep_is_respected() -> None:
    plain, results = chain(), []
    for is_ours in (False, True):
        m, features = copy.deepcopy(plain), []
        m[1].register_forward_hook(lambda _m, _i, out, f=features: f.append(out))
        m[2].register_forward_hook(lambda _m, _i, out: out * 2)
        m[0][0].weight.register_hook(lambda g: g * 3)
        if is_ours:
            rewrite(m, (), X)
            features.clear()
        torch.manual_seed(3)
        (m(X).sum() + features[0].square().sum()).backward()
        results.append([features[0], *(p.grad for p in m.parameters()), *m.buffers()])
    assert same(*results)


@pytest.mark.slow
def test_a_hook_registered_later_still_fires() -> None:
    ours, calls = recomputing_copy(chain(), X), []
    ours[1].register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        ours(X).sum().backward()
    assert calls == [1, 1]
    handle = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(2))
    try:
        ours = recomputing_copy(chain(), X)
        calls.clear()
        ours(X).sum().backward()
        assert len(calls) == 1 + 4 + 16
    finally:
        handle.remove()


class Annealed(nn.Module):
    """Reads plain attributes that a schedule of the user changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature, self.steps = nn.Linear(6, 6), 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).sigmoid() / self.temperature).exp()


@pytest.mark.slow
def test_a_changed_attribute_that_the_forward_reads_is_obeyed() -> None:
    plain = Annealed()
    ours = recomputing_copy(plain, X)
    ours.steps = 7  # nobody reads it
    ours(X)
    for m in (plain, ours):
        m.temperature = 0.5
    outs = [m(X) for m in (plain, ours)]
    for out in outs:
        out.square().sum().backward()
    assert torch.equal(*outs)
    assert torch.equal(plain.layer.weight.grad, ours.layer.weight.grad)


def test_parameters_changed_between_forward_and_backward_are_an_error() -> None:
    """Plain autograd does not save the first layer's weight, but a recomputation would read it."""
    ours = recomputing_copy(nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()), X)
    loss = ours(X).sum()
    with torch.no_grad():
        ours[0].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace.*the parameter or buffer 0\.weight"):
        loss.backward()
