"""PyTorch, numpy and builtins are as they were once nothing is captured, whatever became of the captures."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from script_runs import ENVIRONMENT
from torch import Tensor, nn

ROOTS = ("torch", "numpy", "builtins", "warnings", "random", "logging")
Picture = dict[str, object]


def picture() -> Picture:
    """What functions, classes, their attributes and flags of these libraries are, and what TorchDynamo goes by."""
    from torch._dynamo import compiled_autograd, config, trace_rules
    from torch._dynamo.variables import TorchInGraphFunctionVariable

    found: Picture = {}
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] in ROOTS]:
        for name, value in list(vars(module).items()):
            if isinstance(value, type) and value.__module__.partition(".")[0] in ROOTS:
                whole = f"{value.__module__}.{value.__qualname__}"
                found |= {f"{whole}.{k}": v for k, v in vars(value).items() if callable(v)}
            if callable(value) or isinstance(value, bool):
                found[f"{module.__name__}.{name}"] = value
            if isinstance(value, types.FunctionType):
                found |= {f"{module.__name__}.{name}.{k}": v for k, v in vars(value).items() if isinstance(v, bool)}
    found |= {f"handler of {f}": handler for f, handler in TorchInGraphFunctionVariable._get_handlers().items()}
    found |= {f"rule of {what}": rule for what, rule in trace_rules.get_torch_obj_rule_map().items()}
    found |= {f"allowed {number}": True for number in trace_rules._allowed_callable_ids()}
    found |= {f"filter {entry}": True for entry in warnings.filters}
    found |= {f"config {k}": v for k, v in config.get_config_copy().items()}
    return found | {"compiled_autograd_enabled": compiled_autograd.compiled_autograd_enabled}


def changed(before: Picture, after: Picture) -> list[str]:
    lost = [name for name, value in before.items() if name not in after or after[name] != value]
    kinds = ("handler", "rule", "allowed", "filter", "config")  # of modules more may have been imported meanwhile
    return lost + [name for name in after if name not in before and name.startswith(kinds)]


class Asks(nn.Module):
    """Asks whether it is compiled, and computes with numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * (2.0 if torch.compiler.is_compiling() else float(np.prod((2, 3))))


class Fails(Asks):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("mine")


def hooked() -> nn.Module:
    module = Asks()
    module.layers[2].register_full_backward_hook(lambda *_: None)
    return module


def compile_as_others_do() -> None:
    module = Asks()
    compiled: Any = torch.compile(module.layers, backend="eager")
    compiled(torch.randn(4, 8)).sum().backward()


def capture(module: nn.Module) -> None:
    from lightning_remat import rematerialize

    x = torch.randn(64, 8)
    rematerialize(module, x, memory_budget="90%", planner="periodic")
    module(x).sum().backward()


def fail() -> None:
    with pytest.raises(Exception, match="mine"):
        capture(Fails())


def beside_a_thread(run: Callable[[], None]) -> None:
    """While another thread compiles, one thing after another."""
    is_done, errors = threading.Event(), list[BaseException]()

    def compile_all_the_time() -> None:
        try:
            while not is_done.is_set():
                compile_as_others_do()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=compile_all_the_time)
    thread.start()
    try:
        run()
    finally:
        is_done.set()
        thread.join()
    assert not errors


def main() -> None:
    compile_as_others_do()  # which loads what PyTorch loads at its first capture
    before = picture()
    import lightning_remat  # noqa: F401 - nor does importing it change anything, but what scipy wants to be warned of

    before |= {name: True for name in picture() if name.startswith("filter") and "torch" not in name}
    for run in (lambda: None, lambda: capture(Asks()), lambda: capture(hooked()), fail):
        run()
        beside_a_thread(run)
        assert not (found := changed(before, picture())), found


@pytest.mark.slow
def test_all_is_put_back() -> None:
    subprocess.run([sys.executable, __file__], env=ENVIRONMENT, check=True)


if __name__ == "__main__":
    main()
