"""The peak of a plan is that of a step by it: within a hundredth, and never above the budget."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from least_budgets import least_budget, rematerialized
from random_modules import RandomModule, modules, refusals_left_out
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from training_steps import loss_of, step_peak
from untimed_planner import untimed

from benchmarks.peaks import LOSS_BYTES
from lightning_remat import Plan, rematerialize, restore
from lightning_remat.execution.rewriter import current_plan
from lightning_remat.measure.device_memory import DeviceMemory
from lightning_remat.regions import rematerializer, step_run, whole

X = torch.randn(256, 32)


class Repeated(nn.Module):
    """Linear layers with a function after each."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.does = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)), does

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.does(layer(x).tanh())
        return x


class KeepsOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x, ctx.sine = x, x.sin()
        return x.exp() * ctx.sine

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.x.exp() * (ctx.sine + ctx.x.cos())


def in_frequencies(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x, dim=1)
    return torch.fft.irfft(spectrum * spectrum.abs(), n=x.shape[1], dim=1)


def hooked() -> nn.Module:
    module = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())))
    for layer in module:
        layer.register_forward_hook(lambda _module, _args, output: output * 1.01)
    return module


def hooked_backward() -> nn.Module:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Sigmoid()) for _ in range(4)))
    module[1].register_full_backward_hook(lambda _module, gradients, _output: tuple(g * 1.01 for g in gradients))
    return module


class Attention(nn.Module):
    """Returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True, dropout=0.1) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        weights: list[Tensor] = []
        for layer in self.layers:
            y, own = layer(x, x, x, need_weights=True)
            x = x + y
            weights.append(own)
        return x, weights


def parametrized() -> nn.Module:
    layers = [parametrizations.weight_norm(nn.Linear(32, 64)), nn.Tanh()]
    layers += [parametrizations.spectral_norm(nn.Linear(64, 64)), nn.Tanh()]
    return nn.Sequential(*layers, parametrizations.orthogonal(nn.Linear(64, 64)), nn.Sigmoid(), nn.Linear(64, 32))


class Gated(nn.Module):
    """Reads its input, which has a gradient, in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = layer(h).sigmoid() * x
        return h


class Heads(nn.Module):
    """Two heads on two levels of features, as detectors have them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU())
        self.down = nn.Conv2d(16, 16, 3, 2, 1)
        self.classes = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, 1, 1))
        self.boxes = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU(), nn.Conv2d(16, 4, 3, 1, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.body(x)
        levels = [first, self.down(first)]
        flat = {"classes": self.classes, "boxes": self.boxes}
        return {name: torch.cat([head(f).flatten(2) for f in levels], 2) for name, head in flat.items()}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cells, self.head = nn.Embedding(50, 16), nn.LSTM(16, 32, 2), nn.Linear(32, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.embedding(x))[0])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.cells, self.last = nn.Linear(16, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.first(x).tanh().sigmoid(), torch.tensor([20, 15, 9, 4]), batch_first=True)
        return self.last(pad_packed_sequence(self.cells(packed)[0], batch_first=True)[0]).tanh().sigmoid()


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x, x.flip(1))


class Quantized(nn.Module):
    """A decoder of what an encoder makes, through which no gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Repeated(torch.sigmoid), Repeated(torch.sigmoid)

    def forward(self, x: Tensor) -> Tensor:
        codes = self.encoder(x).mul(255).to(torch.uint8)
        return self.decoder(codes / 255)


class Hidden:
    """Holds tensors that nobody finds in it."""

    def __init__(self, held: list[Tensor]) -> None:
        self.held = held


class Caching(nn.Module):
    """Returns keys and values besides, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Hidden]:
        held: list[Tensor] = []
        for layer in self.layers:
            query, key, value = (t.tanh() for t in layer(x).chunk(3, -1))
            held += [key, value]
            x = query * key + value
        return x, Hidden(held)


KINDS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "kept on ctx": (lambda: Repeated(KeepsOnContext.apply), X),
    "forward hooks": (hooked, X),
    "backward hooks": (hooked_backward, X),
    "complex": (lambda: Repeated(in_frequencies), X),
    "attention weights": (Attention, X.view(4, 64, 32)),
    "detection heads": (Heads, torch.randn(2, 3, 32, 32)),
    "parametrizations": (parametrized, X),
    "input gradients": (Gated, X.clone().requires_grad_()),
    "lstm": (Tokens, torch.randint(50, (20, 4))),
    "packed gru": (Packed, torch.randn(4, 20, 16)),
    "transformer": (Translator, X.view(8, 32, 32)),
    "no gradient to the encoder": (Quantized, X),
    "opaque output": (Caching, X),
}


def assert_as_predicted(module: nn.Module, x: Tensor) -> None:
    """At the least budget that errors tell, in the middle, and where everything fits."""
    least, plain = least_budget(module, x), step_peak(module, x) - LOSS_BYTES
    # One operation that the planner runs again may need more than the plain step.
    for budget in (least, max(least, (least + plain) // 2 + LOSS_BYTES), max(least, plain + LOSS_BYTES)):
        module.zero_grad()
        x.grad = None
        plan = rematerialized(module, x, budget=budget)
        x.grad = None
        measured = step_peak(module, x) - LOSS_BYTES
        assert measured == pytest.approx(plan.peak_bytes, rel=0.01)
        assert measured <= plan.budget_bytes == budget
        restore(module)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_peaks_are_as_predicted(kind: str) -> None:
    torch.manual_seed(0)
    make, x = KINDS[kind]
    assert_as_predicted(make(), x)


@given(modules(max_steps=7))
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@pytest.mark.slow
def test_peaks_of_random_modules_are_as_predicted(module: RandomModule) -> None:
    module.returns_sum = True
    x = torch.randn(600, 4)
    with refusals_left_out():
        loss_of(copy.deepcopy(module)(x)).backward()
    assert_as_predicted(module, x)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_peak_is_that_of_the_plain_step(kind: str) -> None:
    torch.manual_seed(0)
    make, x = KINDS[kind]
    module = make()
    plan = rematerialized(module, x, budget=least_budget(module, x))
    restore(module)
    x.grad = None
    plain = step_peak(module, x) - LOSS_BYTES
    assert plan.plain.peak_bytes == pytest.approx(plain, rel=0.01)
    assert max(plan.plain.memory_bytes) == plan.plain.peak_bytes


class Permuted(nn.Module):
    """A parameter whose gradient comes in another order: accumulation copies it, in the last backward of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.rest = nn.Parameter(torch.randn(32, 32, 32)), nn.Linear(1024, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x @ self.weight.permute(2, 0, 1).reshape(32, 1024))


def test_gradients_that_are_copied_are_counted_twice() -> None:
    module = Permuted()
    measured = step_run.step_peak(module, (X[:8],), {}, is_module_alone=True)
    assert measured == step_peak(module, X[:8]) - LOSS_BYTES
    assert measured > 3 * module.weight.nbytes
    plan = rematerialized(module, X[:8], budget=1 << 30)
    assert plan.peak_bytes == plan.plain.peak_bytes == measured


@pytest.mark.slow
def test_a_corrected_plan_is_stored() -> None:
    plan = rematerialized(hooked(), X, budget=least_budget(hooked(), X) * 2)
    assert plan.correction_bytes
    assert Plan.from_json(plan.to_json()) == plan


class _Weighs:
    """Measures more, or less, than there is."""

    def __init__(self, factor: float) -> None:
        self.factor, self.measured = factor, []

    def __call__(self, *args: Any, **how: Any) -> int:
        self.measured.append(int(MEASURE(*args, **how) * self.factor))
        return self.measured[-1]


MEASURE = step_run.step_peak


def measured_by(measure: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts it in the place of what measures plain steps, and planned ones."""
    for place in (step_run, whole):
        monkeypatch.setattr(place, "step_peak", measure)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.8, 1.0, 1.15])
def test_a_step_that_exceeds_the_budget_is_planned_again(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    module, weighs = Gated(), _Weighs(factor)
    measured_by(weighs, monkeypatch)
    x = X.clone()
    least = least_budget(module, x)
    assert rematerialized(module, x, budget=least).peak_bytes == least == weighs.measured[-1]
    for budget in (int(least * 1.1), int(least * 1.3)):
        weighs.measured.clear()
        plan = rematerialized(module, x, budget=budget)
        plain, *planned = weighs.measured
        assert plan.plain.peak_bytes == plain
        assert plan.peak_bytes <= budget
        fitting = next(k for k, peak in enumerate(planned) if peak <= budget)
        assert fitting == 0 or factor > 1
        assert plan.peak_bytes in planned[fitting:]
        assert len(planned) <= fitting + 2  # one more where the budget leaves room


def test_room_that_the_measured_step_leaves_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module, weighs = Gated(), _Weighs(1.0)
    measured_by(weighs, monkeypatch)
    plan = rematerialize(module, X, memory_budget="90%", planner=untimed)
    _, first, second = weighs.measured
    assert first < second == plan.peak_bytes <= plan.budget_bytes
    assert step_peak(module, X) - LOSS_BYTES == second
    assert plan.num_recomputed == 3  # four by what was predicted at first


def test_the_plain_step_is_not_run_where_it_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    module, weighs = Gated(), _Weighs(1.0)
    plain = rematerialized(module, X, budget=1 << 30).plain.peak_bytes
    measured_by(weighs, monkeypatch)
    monkeypatch.setattr(step_run, "device_memory", lambda _device: DeviceMemory(plain // 2, plain))
    plan = rematerialized(module, X, budget=plain * 9 // 10)
    assert plain not in weighs.measured
    assert plan.plain.peak_bytes == pytest.approx(plain, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("message", ["CUDA out of memory", "another error"])
def test_a_plain_step_that_runs_out_of_memory_leaves_a_prediction(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weighs = _Weighs(1.0)

    def fails_at_first(module: nn.Module, *args: Any, **how: Any) -> int:
        if current_plan(module) is None:
            raise RuntimeError(message)
        return weighs(module, *args, **how)

    measured_by(fails_at_first, monkeypatch)
    module = Gated()
    if "memory" not in message:
        with pytest.raises(RuntimeError, match=message):
            rematerialize(module, X, memory_budget="90%", planner="periodic")
    else:
        plan = rematerialize(module, X, memory_budget="90%", planner="periodic")
        assert plan.num_recomputed
        assert plan.peak_bytes == weighs.measured[-1]


@pytest.mark.slow
def test_a_plan_on_fake_tensors_is_a_prediction_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with FakeTensorMode():
        module, x = hooked(), torch.randn(256, 32)
    with caplog.at_level(logging.INFO, "lightning_remat"):
        plan = rematerialized(module, x, budget=1 << 30)
    assert plan.correction_bytes == 0
    assert "the peak is predicted, no step was run to measure it; what kernels" in caplog.text


@pytest.mark.slow
def test_without_a_budget_what_is_free_is_planned_for_beside_what_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Sigmoid()) for _ in range(6)))
    x = torch.randn(128, 256)
    needed = rematerialize(module, x, memory_budget="100%", planner="periodic").peak_bytes
    module(x).sum().backward()  # gradients are held, too
    owned = sum(2 * p.nbytes for p in module.parameters()) + x.nbytes
    monkeypatch.setattr(rematerializer, "device_memory", lambda _: DeviceMemory(needed - owned, 1 << 40))
    assert rematerialize(module, x, planner="periodic").budget_bytes == needed
