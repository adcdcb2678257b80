"""Steps that ask for derivatives of their own are planned, or trained plainly with one warning; never an exception."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from same_runs import BATCH, WIDTH, Deep, Manual, assert_same_run, deep, remat
from torch import Tensor, nn

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(treespec|LeafSpec|isinstance).*"),
    pytest.mark.filterwarnings("ignore:a training step needed"),  # what LBFGS remembers grows from step to step
]


class Penalty(Deep):
    """The gradient of the output with respect to the input is part of the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].detach().requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + (slope.square().sum(1) - 1).square().mean()


class Forces(Deep):
    """A derivative is used as a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x)
        self.seen.append(slope.norm().item())
        return (self.net(x) * slope.detach()).mean()


class PlainBackward(Manual):
    """Calls `backward` of the loss itself, and reads gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.net(batch[0]).square().mean().backward()
        self.seen.append(sum(p.grad.norm().item() for p in self.net.parameters() if p.grad is not None))
        optimizer.step()


class ManualNorm(Manual):
    """Reads gradients after Lightning's backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch[0]).square().mean())
        self.seen.append(torch.stack([p.grad.norm() for p in self.net.parameters()]).tolist())  # pyright: ignore
        optimizer.step()


class ClosureStep(Manual):
    """The optimizer runs the step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.net(batch[0]).square().mean()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


class Adversaries(Manual):
    """Two optimizers, one after the other, each with its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.other = deep()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # pyright: ignore
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(self.other(self.net(batch[0])).square().mean())
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        self.manual_backward((self.other(self.net(batch[0]).detach()) - 1).square().mean())
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.net.parameters()), torch.optim.SGD(self.other.parameters(), 0.1)]


class Functional(Deep):
    """`torch.func` takes the derivative."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def energy(x: Tensor) -> Tensor:
            return self.net[0](x).square().mean()

        slope = torch.func.grad(energy)(batch[0])
        return self.net(batch[0] + slope).square().mean()


class Copied(Deep):
    """Learns to differ from what it is now."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        now = copy.deepcopy(self.net).requires_grad_(False)
        return (self.net(batch[0]) - now(batch[0].requires_grad_())).square().mean()


class MetaLearning(Manual):
    """A copy adapts to one half of the batch, and the gradients that it then has for the other are the network's."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        seen, held_back = batch[0].chunk(2)
        learner = copy.deepcopy(self.net)
        weights = list(learner.parameters())
        slopes = torch.autograd.grad(learner(seen).square().mean(), weights)
        with torch.no_grad():
            for weight, slope in zip(weights, slopes, strict=True):
                weight -= 0.1 * slope
        slopes = torch.autograd.grad((learner(held_back) - self.net(held_back).detach()).square().mean(), weights)
        for parameter, slope in zip(self.net.parameters(), slopes, strict=True):
            parameter.grad = slope
        optimizer.step()


STEPS = [Penalty, Forces, PlainBackward, ManualNorm, ClosureStep, Adversaries, Functional, Copied, MetaLearning]


@pytest.mark.slow
@pytest.mark.parametrize("factory", STEPS)
@pytest.mark.filterwarnings("ignore:Rematerialization leaves the model as it is")
@pytest.mark.parametrize("batch_size", ["keep", pytest.param("auto", marks=pytest.mark.slow)])
def test_run_is_the_plain_run(tmp_path: Path, factory: Any, batch_size: Any) -> None:
    limits = {} if batch_size == "keep" else {"min_batch_size": BATCH, "max_batch_size": BATCH}
    callback = remat(batch_size=batch_size, **limits)
    assert_same_run(tmp_path, factory, callback=callback, is_planned=None, max_steps=4)
    if factory in (Forces, PlainBackward, ManualNorm, ClosureStep, Adversaries, Copied):
        assert callback.result is not None
        assert callback.result.step.num_recomputed > 0


class Bare(Deep):
    """Multiplies by parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch[0] @ self.weight).square().mean()


class Skipping(Deep):
    """Leaves all steps out."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


class Replaced(Deep):
    """Its network's `forward` was exchanged on the instance."""

    def __init__(self) -> None:
        super().__init__()
        original = self.net.forward
        self.net.forward = lambda x: original(x) * 2  # pyright: ignore


class Single(Deep):
    """One layer: nothing to gain."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)  # pyright: ignore


@pytest.mark.parametrize("factory", [Bare, Skipping])
@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
def test_one_warning_and_the_plain_model(tmp_path: Path, factory: Any) -> None:
    with pytest.warns(UserWarning, match="Rematerialization leaves the model as it is") as caught:
        assert_same_run(tmp_path, factory, is_planned=False)
    assert len([w for w in caught if "Rematerialization leaves" in str(w.message)]) == 1


@pytest.mark.filterwarnings("ignore:Rematerialization leaves the model as it is")
def test_nothing_to_gain(tmp_path: Path) -> None:
    assert_same_run(tmp_path, Single, callback=remat(memory_budget="100%"), is_planned=False)


class Failing(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise LookupError("mine")


@pytest.mark.parametrize("batch_size", ["keep", "auto", 32])
def test_users_errors_come_through_as_theirs(tmp_path: Path, batch_size: Any) -> None:
    callback = remat(batch_size=batch_size)
    with pytest.raises(LookupError, match="mine") as caught:
        assert_same_run(tmp_path / "ours", Failing, callback=callback)
    assert caught.value.__cause__ is None


class Sparse(Deep):
    """Gradients that hold but some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, WIDTH, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.table(batch[0].abs().mul(5).long()[:, 0]) * self.net(batch[0]).detach()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam(list(self.table.parameters()), lr=0.1)


class SparseAndDense(Sparse, Manual):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        rows = self.table(batch[0].abs().mul(5).long()[:, 0])
        self.manual_backward((rows + self.net(batch[0])).square().mean())
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        sparse = torch.optim.SparseAdam(list(self.table.parameters()), lr=0.1)
        return [sparse, torch.optim.Adam(self.net.parameters(), 1e-2)]


class Outdated(torch.optim.SGD):
    """Calls its closure without gradients, as old optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore
        loss = closure() if closure is not None else None
        super().step()
        return loss


class WithOutdated(Deep):
    def configure_optimizers(self) -> Any:
        return Outdated(self.parameters(), lr=0.1)


class WithNewton(Deep):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class OwnStep(Deep):
    """Looks at what Lightning hands over."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        from lightning.pytorch.loops.optimization.automatic import Closure

        assert isinstance(optimizer_closure, Closure)
        self.seen.append((epoch, batch_idx))
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


@pytest.mark.slow
@pytest.mark.parametrize("factory", [SparseAndDense, WithOutdated, WithNewton, OwnStep])
@pytest.mark.parametrize("batch_size", ["keep", pytest.param("auto", marks=pytest.mark.slow)])
def test_optimizers(tmp_path: Path, factory: Any, batch_size: Any) -> None:
    limits = {} if batch_size == "keep" else {"min_batch_size": BATCH, "max_batch_size": BATCH}
    options = remat(batch_size=batch_size, memory_budget="90%", **limits)
    assert_same_run(tmp_path, factory, callback=options, max_steps=6, is_planned=None)


@pytest.mark.slow
def test_accumulation_is_seen(tmp_path: Path) -> None:
    callback = assert_same_run(tmp_path, accumulate_grad_batches=2, max_steps=4)
    assert callback.result is not None
    assert callback.result.step.surroundings.is_accumulating
