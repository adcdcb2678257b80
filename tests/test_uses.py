"""The ways in which a training loop uses a module: each as with the plain one."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rewriting import assert_equal_steps, recomputing_copy, rewrite
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint
from training_steps import assert_equal_traces, traces

from lightning_remat import executor, rematerialize

X = torch.randn(10, 6)


def chain(depth: int = 4) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.BatchNorm1d(6), nn.Sigmoid()) for _ in range(depth))
    )


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all((x is None and y is None) or torch.equal(x, y) for x, y in zip(a, b, strict=True))


def compared(use: Callable[[nn.Module], list[Any]], module: nn.Module | None = None) -> None:
    """What `use` returns is the same for a plain module and for one that recomputes everything."""
    plain = chain() if module is None else module
    results = []
    for m in (copy.deepcopy(plain), recomputing_copy(plain, X)):
        torch.manual_seed(3)
        results.append([*use(m), *(p.grad for p in m.parameters()), *m.buffers(), torch.get_rng_state()])
    assert same(*results)


class Two(nn.Module):
    """Two outputs from a shared trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = chain(2), chain(1), chain(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.trunk(x)
        return self.left(y), self.right(y)


@pytest.mark.parametrize("which", [0, 1])
def test_a_loss_on_one_of_two_outputs(which: int) -> None:
    def use(m: nn.Module) -> list[Any]:
        m(X)[which].square().sum().backward()
        return []

    compared(use, Two())


def test_outputs_one_after_the_other() -> None:
    def use(m: nn.Module) -> list[Any]:
        a, b = m(X)
        a.sum().backward(retain_graph=True)
        b.square().sum().backward()
        return []

    compared(use, Two())


def test_gradients_of_inputs_and_parameters_with_autograd_grad() -> None:
    def use(m: nn.Module) -> list[Any]:
        x = X.clone().requires_grad_()
        loss = m(x).square().sum()
        some = torch.autograd.grad(loss, [m[1][0].weight], retain_graph=True)
        return [*some, *torch.autograd.grad(loss, [x, *m.parameters()])]

    compared(use)


def test_accumulation_over_batches_and_several_forwards() -> None:
    def use(m: nn.Module) -> list[Any]:
        for k in range(3):
            m(X + k).square().sum().backward()
        (m(X).sum() + m(X * 2).square().sum()).backward()
        return []

    compared(use)


def test_gradient_penalty_with_parameters() -> None:
    def use(m: nn.Module) -> list[Any]:
        x = X.clone().requires_grad_()
        out = m(x)
        (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        (out.mean() + (gradient.norm(2, dim=1) - 1).square().mean()).backward()
        return [x.grad]

    compared(use)


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


def test_batch_and_image_sizes_change() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1))
    ours = recomputing_copy(module, torch.randn(4, 3, 9, 9))
    batches = [torch.randn(n, 3, s, s) for n, s in ((4, 9), (2, 7), (5, 12), (1, 9))]
    assert_equal_traces(traces(module, batches), traces(ours, batches))


def test_hooks_of_every_kind_fire_as_often_as_in_the_plain_run() -> None:
    counts: list[list[str]] = []
    plain = chain()
    for is_ours in (False, True):
        m, calls = copy.deepcopy(plain), []
        counts.append(calls)
        for name, layer in (("block", m[1]), ("linear", m[2][0]), ("norm", m[2][2]), ("root", m)):
            layer.register_forward_pre_hook(lambda *_, n=name, c=calls: c.append(f"{n} pre"))
            layer.register_forward_hook(lambda *_, n=name, c=calls: c.append(f"{n} post"))
            layer.register_full_backward_pre_hook(lambda *_, n=name, c=calls: c.append(f"{n} backward pre"))
            layer.register_full_backward_hook(lambda *_, n=name, c=calls: c.append(f"{n} backward"))
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


def test_a_hook_registered_later_still_fires() -> None:
    ours, calls = recomputing_copy(chain(), X), []
    ours[1].register_forward_hook(lambda *_: calls.append(1))
    with pytest.warns(UserWarning, match="a hook has been registered"):
        ours(X).sum().backward()
    assert calls == [1]
    handle = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(2))
    try:
        ours = recomputing_copy(chain(), X)
        calls.clear()
        with pytest.warns(UserWarning, match="hooks for all modules"):
            ours(X)
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


def test_a_changed_attribute_that_the_forward_reads_is_noticed() -> None:
    plain = Annealed()
    ours = recomputing_copy(plain, X)
    ours.steps = 7  # nobody reads it
    ours(X)
    for m in (plain, ours):
        m.temperature = 0.5
    with pytest.warns(UserWarning, match=r"the attribute temperature, which was 1\.0, has changed"):
        out = ours(X)
    assert torch.equal(out, plain(X))


def test_parameters_changed_between_forward_and_backward_are_an_error() -> None:
    """Plain autograd does not save the first layer's weight, but a recomputation would read it."""
    ours = recomputing_copy(nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()), X)
    loss = ours(X).sum()
    with torch.no_grad():
        ours[0].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace.*the parameter or buffer 0\.weight"):
        loss.backward()


def test_functional_call_recomputes_with_the_parameters_of_its_forward() -> None:
    def use(m: nn.Module) -> list[Any]:
        values = {n: (p.detach() * 1.5).requires_grad_() for n, p in m.named_parameters()}
        values |= {n: b.clone() for n, b in m.named_buffers()}
        out = functional_call(m, values, (X,))
        wanted = [v for v in values.values() if v.requires_grad]
        return [out, *torch.autograd.grad(out.square().sum(), wanted), *values.values()]

    compared(use)


def test_transforms_of_torch_func_use_the_plain_forward() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 6))
    ours = recomputing_copy(module, X)

    def gradients(m: nn.Module) -> dict[str, Tensor]:
        return torch.func.grad(lambda p: functional_call(m, p, (X,)).sum())(dict(m.named_parameters()))

    with pytest.warns(UserWarning, match=r"a transform of torch\.func"):
        found = gradients(ours)
    assert same(list(found.values()), list(gradients(module).values()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around(reentrant: bool) -> None:
    def use(m: nn.Module) -> list[Any]:
        x = X.clone().requires_grad_()
        checkpoint(m, x, use_reentrant=reentrant).square().sum().backward()
        return [x.grad]

    compared(use, nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.LayerNorm(6), nn.Sigmoid()))


def test_copies_and_pickles_train_alike() -> None:
    plain = chain()
    ours = recomputing_copy(plain, X)
    expected = traces(copy.deepcopy(plain), [X] * 2)
    assert_equal_traces(expected, traces(copy.deepcopy(ours), [X] * 2))
    assert_equal_traces(expected, traces(pickle.loads(pickle.dumps(ours)), [X] * 2))


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
    def test_a_rewritten_module_runs_as_it_is_in_a_compiled_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        inner = without_random()
        plain = nn.Sequential(nn.Linear(6, 6), inner)
        ours = copy.deepcopy(plain)
        rewrite(ours[1], (), X)
        runs: list[str] = []
        evaluate = executor.evaluate
        monkeypatch.setattr(executor, "evaluate", lambda *a, **k: (runs.append(a[1].name), evaluate(*a, **k))[1])
        for backend in ("eager", "aot_eager"):
            runs.clear()
            ours.zero_grad()
            plain.zero_grad()
            torch._dynamo.reset()
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


def test_rewriting_a_module_replaces_the_rewriting_of_its_parts() -> None:
    outer = nn.Sequential(nn.Linear(6, 6), recomputing_copy(chain(), X))
    rematerialize(outer, X, memory_budget="100%", planner="periodic")
    assert "forward" not in vars(outer[1])


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


def test_equal_steps_notices_a_difference() -> None:
    with pytest.raises(AssertionError):
        assert_equal_steps(chain(1), X, step=_different)


def _different(module: nn.Module, args: tuple[Tensor]) -> Tensor:
    loss = module(*args).sum() * (2 if "forward" in vars(module) else 1)
    loss.backward()
    return loss
