"""The model that a target names, made of fake tensors."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .usage_error import UsageError, one_line

_TARGET = re.compile(r"([\w.]+):([\w.]+)(\(.*\))?", re.DOTALL)
_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageClassification", "AutoModel")


def make_module(target: str, mode: FakeTensorMode) -> nn.Module:
    """The model in training mode; none of its memory is allocated where its constructor allows that.

    Raises:
        UsageError: The target names none, or its own code fails.
    """
    if target.endswith(".json"):
        config = _read_config(Path(target))
        made = _constructed(lambda: config, target, mode)
    else:
        maker, arguments, options = _resolve(target)
        if isinstance(maker, nn.Module):
            made = _faked(maker, mode)
        elif callable(maker):
            made = _constructed(lambda: maker(*arguments, **options), target, mode)
        else:
            raise UsageError(f"{target} is a {type(maker).__name__}, expected a function or class that makes a model")
    return made.train()


def _constructed(make: Any, target: str, mode: FakeTensorMode) -> nn.Module:
    """What `make` makes: on fake tensors, or, where it reads values while it is made, on real ones exchanged after."""
    try:
        with mode:
            return _as_module(make(), target)
    except UsageError:
        raise
    except Exception:  # drop path rates, pretrained weights: the second try tells what is wrong, if anything is
        try:
            return _faked(_as_module(make(), target), mode)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"cannot make {target}: {one_line(error)}") from error


def _as_module(made: Any, target: str) -> nn.Module:
    if isinstance(made, nn.Module):
        return made
    if hasattr(made, "model_type") and hasattr(made, "to_dict"):
        return _of_config(made)
    raise UsageError(f"{target} made a {type(made).__name__}, expected a torch.nn.Module or a Hugging Face config")


def _resolve(target: str) -> tuple[Any, list[Any], dict[str, Any]]:
    """What the target names, and the arguments written after it."""
    match = _TARGET.fullmatch(target)
    if match is None:
        raise UsageError(
            f"the target is {target!r}, expected package.module:callable (such as torchvision.models:resnet50) or the "
            "path of a Hugging Face config.json"
        )
    module_name, path, call = match.groups()
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UsageError(f"there is no module {error.name!r} here: is it installed, and spelled so?") from error
        raise UsageError(f"cannot import {module_name}: {one_line(error)}") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"cannot import {module_name}: {one_line(error)}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise UsageError(f"{getattr(found, '__name__', module_name)} has no {name!r}")
        found = getattr(found, name)
    return found, *_arguments(call, target)


def _arguments(call: str | None, target: str) -> tuple[list[Any], dict[str, Any]]:
    if call is None:
        return [], {}
    try:
        tree = cast(ast.Call, ast.parse(f"f{call}", mode="eval").body)
        positional = [ast.literal_eval(node) for node in tree.args]
        return positional, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords}
    except (SyntaxError, ValueError, AttributeError):
        raise UsageError(f"the arguments of {target!r} must be plain values, as in module:Net(64, name='x')") from None


def _read_config(path: Path) -> Any:
    """The Hugging Face config of a file."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {one_line(error)}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise UsageError(f"{path} has no model_type, so it is no Hugging Face config")
    transformers = _transformers()
    try:
        return transformers.AutoConfig.for_model(**values)
    except Exception as error:
        raise UsageError(
            f"{path} is no config that transformers {transformers.__version__} knows: {one_line(error)}"
        ) from error


def _of_config(config: Any) -> nn.Module:
    """The model that the config names, or a language model, image classifier or bare model by it."""
    transformers = _transformers()
    config.use_cache = False  # what generation keeps, training does not
    for name in getattr(config, "architectures", None) or ():
        if (model_class := getattr(transformers, name, None)) is not None:
            return model_class(config)
    for name in _AUTO_CLASSES:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto.from_config(config)
    raise UsageError(f"transformers has no model for {type(config).__name__}")


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError("a Hugging Face config needs transformers: pip install transformers") from error


def _faked(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The module with fake parameters and buffers in place of its own."""

    def fake(tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    with mode:
        return exchanged(module, fake)


def exchanged(module: nn.Module, exchange: Callable[[Tensor], Tensor]) -> nn.Module:
    """The module with other parameters and buffers; what was shared stays shared.

    `Module.to` cannot do it: it exchanges what lies behind a fake parameter, which has nothing behind it.
    """
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for slots in (part._parameters, part._buffers):  # pyright: ignore[reportPrivateUsage]
            for name, tensor in slots.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    with torch.no_grad():
                        other = exchange(tensor)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(other, tensor.requires_grad) if is_parameter else other
                slots[name] = cast(Any, made[id(tensor)])
    return module
