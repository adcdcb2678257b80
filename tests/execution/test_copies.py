"""Copies of a rewritten module, in files, threads, replicas and compilers, run and train as those of the plain one."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from rewriting import counted_runs, recomputing_copy, rewrite
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from training_steps import assert_equal_traces, traces
from uses import X, chain, compared, same

from lightning_remat import rematerialize


@pytest.mark.slow
def test_copies_and_pickles_train_alike() -> None:
    plain = chain()
    ours = recomputing_copy(plain, X)
    expected = traces(copy.deepcopy(plain), [X] * 2)
    assert_equal_traces(expected, traces(copy.deepcopy(ours), [X] * 2))
    assert_equal_traces(expected, traces(pickle.loads(pickle.dumps(ours)), [X] * 2))


@pytest.mark.slow
def test_a_pickle_and_a_shallow_copy_are_the_plain_module() -> None:
    ours = recomputing_copy(chain(), X)
    for other in (copy.copy(ours), pickle.loads(pickle.dumps(ours))):
        assert vars(other).keys() == vars(chain()).keys()
    assert b"lightning_remat" not in pickle.dumps(ours)


@pytest.mark.slow
def test_state_dict_both_ways() -> None:
    plain = chain()
    ours = recomputing_copy(plain, X)
    other = chain()
    assert list(ours.state_dict()) == list(plain.state_dict())
    ours.load_state_dict(other.state_dict())
    traces(ours, [X])
    plain.load_state_dict(ours.state_dict())
    assert_equal_traces(traces(plain, [X]), traces(ours, [X]))
    blank = copy.deepcopy(ours)
    blank.load_state_dict(plain.state_dict(), assign=True)
    assert_equal_traces(traces(copy.deepcopy(plain), [X]), traces(blank, [X]))


@pytest.mark.slow
@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)])
def test_averaged_models(average: Any) -> None:
    def use(m: nn.Module) -> list[Any]:
        averaged = AveragedModel(m, multi_avg_fn=average)
        optimizer = torch.optim.SGD(m.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            m(X).square().sum().backward()
            optimizer.step()
            averaged.update_parameters(m)
        update_bn([X, X + 1], averaged)
        averaged(X).sum().backward()
        return [*averaged.parameters(), *averaged.buffers(), *(p.grad for p in averaged.parameters())]

    compared(use)


def in_threads(runs: list[Callable[[], Any]]) -> None:
    errors: list[BaseException] = []

    def guarded(run: Callable[[], Any]) -> None:
        try:
            run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def without_random() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Sigmoid()) for _ in range(4)))


@pytest.mark.slow
def test_two_models_in_two_threads_and_one_model_in_both() -> None:
    plain = [without_random() for _ in range(2)]
    expected = [traces(copy.deepcopy(m), [X] * 20) for m in plain]
    ours = [recomputing_copy(m, X) for m in plain]
    found: dict[int, dict[str, Tensor]] = {}
    in_threads([lambda k=k: found.update({k: traces(ours[k], [X] * 20)}) for k in range(2)])
    for k in range(2):
        assert_equal_traces({n: t for n, t in expected[k].items() if "random" not in n},
                            {n: t for n, t in found[k].items() if "random" not in n})  # fmt: skip
    shared, gradients = recomputing_copy(plain[0], X), {}

    def on_shared(k: int) -> None:
        for _ in range(20):
            gradients[k] = torch.autograd.grad(shared(X * (k + 1)).square().sum(), list(shared.parameters()))

    in_threads([lambda k=k: on_shared(k) for k in range(2)])
    for k in range(2):
        loss = plain[0](X * (k + 1)).square().sum()
        assert same(list(gradients[k]), list(torch.autograd.grad(loss, list(plain[0].parameters()))))


def test_random_operations_in_two_threads_have_one_mask_each() -> None:
    """The gradient of dropout is its mask: that of the forward, whatever the other thread draws."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Sigmoid(), nn.Dropout(0.5))
    ours = recomputing_copy(module, X)
    wrong: list[int] = []

    def steps() -> None:
        for _ in range(50):
            x = X.clone().requires_grad_()
            out = ours(x)
            (gradient,) = torch.autograd.grad(out.sum(), out)
            del gradient
            torch.autograd.grad(out.sum(), x)
            if not torch.isfinite(out).all():
                wrong.append(1)

    ours(X.clone().requires_grad_())  # TorchDynamo sets the generators back after a capture, whoever draws meanwhile
    in_threads([steps, steps])
    assert not wrong


def test_replicas_as_data_parallel_makes_them() -> None:
    module = without_random()
    ours = recomputing_copy(module, X)
    replica = ours._replicate_for_data_parallel()
    assert replica.forward.__self__ is replica
    replica._parameters, replica._buffers, replica._modules = (
        {},
        {},
        {k: copy.deepcopy(m) for k, m in ours.named_children()},
    )
    with torch.no_grad():
        for p in replica.parameters():
            p.mul_(2)
            p.grad = None
    replica(X).sum().backward()
    assert all(p.grad is None for p in ours.parameters())
    assert all(p.grad is not None for p in replica.parameters())
    replicas = [ours, copy.deepcopy(ours)]
    outputs = []
    in_threads([lambda m=m: outputs.append(m(X)) for m in replicas])
    sum(o.sum() for o in outputs).backward()
    module(X).sum().backward()
    for m in replicas:
        assert same([p.grad for p in m.parameters()], [p.grad for p in module.parameters()])


class TestCompilers:
    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo asks for it
    def test_a_rewritten_module_runs_as_it_is_in_a_compiled_one(self) -> None:
        inner = without_random()
        plain = nn.Sequential(nn.Linear(6, 6), inner)
        ours = copy.deepcopy(plain)
        rewrite(ours[1], (), X)
        for backend in ("eager", "aot_eager"):
            ours.zero_grad()
            plain.zero_grad()
            torch._dynamo.reset()
            with counted_runs(ours[1]) as runs:
                torch.compile(ours, backend=backend)(X).square().sum().backward()
            plain(X).square().sum().backward()
            assert same([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
            assert len(runs) > 12
        torch._dynamo.reset()
        with pytest.raises(Exception, match="runs by its schedule"):
            torch.compile(ours, backend="eager", fullgraph=True)(X)

    def test_a_compiled_module_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"OptimizedModule.*Remedy"):
            rematerialize(torch.compile(chain(), backend="eager"), X, memory_budget="90%")

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
    def test_what_fabric_made_is_refused_and_what_it_was_given_is_not(self, precision: Any) -> None:
        module = chain()
        wrapped = Fabric(accelerator="cpu", devices=1, precision=precision).setup_module(module)
        with pytest.raises(ValueError, match=r"_FabricModule.*Remedy: rematerialize the module given to"):
            rematerialize(wrapped, X, memory_budget="90%", planner="periodic")
        assert rematerialize(module, X, memory_budget="90%", planner="periodic").num_recomputed


@pytest.mark.slow
def test_rewriting_a_module_replaces_the_rewriting_of_its_parts() -> None:
    outer = nn.Sequential(nn.Linear(6, 6), recomputing_copy(chain(), X))
    rematerialize(outer, X, memory_budget="100%", planner="periodic")
    assert "forward" not in vars(outer[1])
