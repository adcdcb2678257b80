"""The ways in which a training loop uses a module: each as with the plain one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rewriting import assert_equal_steps, recomputing_copy
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from training_steps import assert_equal_traces, traces
from uses import X, chain, compared, same


class Two(nn.Module):
    """Two outputs from a shared trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = chain(2), chain(1), chain(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.trunk(x)
        return self.left(y), self.right(y)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_a_loss_on_one_of_two_outputs(which: int) -> None:
    def use(m: nn.Module) -> list[Any]:
        m(X)[which].square().sum().backward()
        return []

    compared(use, Two())


@pytest.mark.slow
def test_outputs_one_after_the_other() -> None:
    def use(m: nn.Module) -> list[Any]:
        a, b = m(X)
        a.sum().backward(retain_graph=True)
        b.square().sum().backward()
        return []

    compared(use, Two())


@pytest.mark.slow
def test_gradients_of_inputs_and_parameters_with_autograd_grad() -> None:
    def use(m: nn.Module) -> list[Any]:
        x = X.clone().requires_grad_()
        loss = m(x).square().sum()
        some = torch.autograd.grad(loss, [m[1][0].weight], retain_graph=True)
        return [*some, *torch.autograd.grad(loss, [x, *m.parameters()])]

    compared(use)


@pytest.mark.slow
def test_accumulation_over_batches_and_several_forwards() -> None:
    def use(m: nn.Module) -> list[Any]:
        for k in range(3):
            m(X + k).square().sum().backward()
        (m(X).sum() + m(X * 2).square().sum()).backward()
        return []

    compared(use)


@pytest.mark.slow
def test_gradient_penalty_with_parameters() -> None:
    def use(m: nn.Module) -> list[Any]:
        x = X.clone().requires_grad_()
        out = m(x)
        (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (out.mean() + (gradient.norm(2, dim=1) - 1).square().mean()).backward()
        return [x.grad]

    compared(use)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_gradient_scaler(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    images = torch.randn(4, 3, 8, 8)

    def use(m: nn.Module) -> list[Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = m(images).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return [loss, *m.parameters()]

    both = (copy.deepcopy(module), recomputing_copy(module, images))
    assert same(*([*use(m), *(p.grad for p in m.parameters())] for m in both))


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [["0."], ["3."], ["1.", "2."], ["0.0.weight", "1.0.bias"]])
def test_frozen_parts_and_parts_unfrozen_later(frozen: list[str]) -> None:
    def use(m: nn.Module) -> list[Any]:
        found: list[Any] = []
        for requires in (False, True, False):
            for name, p in m.named_parameters():
                p.requires_grad_(requires or not name.startswith(tuple(frozen)))
            m.zero_grad()
            m(X).square().sum().backward()
            found += [None if p.grad is None else p.grad.clone() for p in m.parameters()]
        return found

    compared(use)
    module = chain()
    for name, p in module.named_parameters():
        p.requires_grad_(not name.startswith(tuple(frozen)))
    compared(use, module)


@pytest.mark.slow
def test_batch_and_image_sizes_change() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1))
    ours = recomputing_copy(module, torch.randn(4, 3, 9, 9))
    batches = [torch.randn(n, 3, s, s) for n, s in ((4, 9), (2, 7), (5, 12), (1, 9))]
    assert_equal_traces(traces(module, batches), traces(ours, batches))


@pytest.mark.slow
def test_functional_call_recomputes_with_the_parameters_of_its_forward() -> None:
    def use(m: nn.Module) -> list[Any]:
        values = {n: (p.detach() * 1.5).requires_grad_() for n, p in m.named_parameters()}
        values |= {n: b.clone() for n, b in m.named_buffers()}
        out = functional_call(m, values, (X,))
        wanted = [v for v in values.values() if v.requires_grad]
        return [out, *torch.autograd.grad(out.square().sum(), wanted), *values.values()]

    compared(use)


def cloned(module: nn.Module) -> nn.Module:
    """As libraries for meta-learning do: all attributes, then parameters that lead to the module's own."""
    clone = module.__new__(type(module))
    vars(clone).update(vars(module))
    clone._parameters = {n: None if p is None else p.clone() for n, p in module._parameters.items()}  # pyright: ignore
    clone._buffers = {n: None if b is None else b.clone() for n, b in module._buffers.items()}
    clone._modules = {n: None if m is None else cloned(m) for n, m in module._modules.items()}
    return clone


@pytest.mark.parametrize("is_hooked", [False, True])
def test_a_clone_that_has_all_attributes_runs_with_its_own_parameters(is_hooked: bool) -> None:
    def use(m: nn.Module) -> list[Any]:
        found: list[Any] = []
        clone = cloned(m)
        weights = [p for part in clone.modules() for p in part._parameters.values() if p is not None]
        hook = clone.register_forward_pre_hook(lambda _, args: (args[0] + 1,)) if is_hooked else None
        for _ in range(2):
            slopes = torch.autograd.grad(clone(X).square().sum(), weights, create_graph=True)
            with torch.no_grad():
                for weight, slope in zip(weights, slopes, strict=True):
                    weight -= 0.01 * slope
            (clone(X).square().sum() + m(X).sum()).backward()
            with torch.no_grad():
                found += [clone(X), m(X)]
        if hook is not None:
            hook.remove()
        return [*found, *(b for part in clone.modules() for b in part._buffers.values())]

    compared(use)


def test_transforms_of_torch_func_use_the_plain_forward() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 6))
    ours = recomputing_copy(module, X)

    def gradients(m: nn.Module) -> dict[str, Tensor]:
        return torch.func.grad(lambda p: functional_call(m, p, (X,)).sum())(dict(m.named_parameters()))

    with pytest.warns(UserWarning, match=r"a transform of torch\.func"):
        found = gradients(ours)
    assert same(list(found.values()), list(gradients(module).values()))


@pytest.mark.slow
@pytest.mark.filterwarnings(r"ignore:.*torch\.jit")  # PyTorch's own functions for such derivatives are scripted
def test_where_derivatives_are_taken_forwards_the_plain_forward_runs() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Dropout(0.2), nn.Linear(6, 6))
    ours = recomputing_copy(module, X)

    def derivatives(m: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        with forward_ad.dual_level():
            value, slope = forward_ad.unpack_dual(m(forward_ad.make_dual(X, torch.ones_like(X))))
            assert slope is not None
            wanted = [p for name, p in m.named_parameters() if name.endswith("weight")]
            return [value, slope, *torch.autograd.grad(slope.square().sum() + value.sum(), wanted)]

    with pytest.warns(UserWarning, match="where derivatives are taken forwards"):
        found = derivatives(ours)
    assert same(found, derivatives(module))
    batches = [X, X + 1]
    assert_equal_traces(traces(module, batches), traces(ours, batches))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around(reentrant: bool) -> None:
    def use(m: nn.Module) -> list[Any]:
        x = X.clone().requires_grad_()
        checkpoint(m, x, use_reentrant=reentrant).square().sum().backward()
        return [x.grad]

    compared(use, nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.LayerNorm(6), nn.Sigmoid()))


@pytest.mark.slow
def test_two_rewritten_models_train_each_other() -> None:
    """A generator and a discriminator, each rewritten, as in a GAN."""

    def use(pair: nn.Module) -> list[Any]:
        generator, judge = pair[0], pair[1]
        found = []
        for k in range(2):
            fake = generator(X + k)
            (judge(fake.detach()).mean() - judge(X).mean()).backward()
            judge.zero_grad()
            (-judge(fake).mean()).backward()
            found += [p.grad.clone() for p in generator.parameters()]
            pair.zero_grad()
        return found

    plain = nn.ModuleList([chain(2), chain(2)])
    ours = nn.ModuleList([recomputing_copy(m, X) for m in plain])
    results = []
    for pair in (plain, ours):
        torch.manual_seed(3)
        results.append([*use(pair), *pair.buffers()])
    assert same(*results)


@pytest.mark.slow
def test_equal_steps_notices_a_difference() -> None:
    with pytest.raises(AssertionError):
        assert_equal_steps(chain(1), X, step=_different)


def _different(module: nn.Module, args: tuple[Tensor]) -> Tensor:
    loss = module(*args).sum() * (2 if "forward" in vars(module) else 1)
    loss.backward()
    return loss
