"""Calls that TorchDynamo puts in a graph otherwise than the user wrote them: here they do what the user's did.

What it runs in their place is meant to be compiled: run eagerly, a custom function keeps what it saves for ever, a call
of `torch.utils.checkpoint` recomputes otherwise, and an assertion that fails is another error, or none where a device
runs behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

# fx does not type the modules that it generates, nor autograd its contexts.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


class CustomFunction:
    """A `torch.autograd.Function`, captured as one graph for its forward and one for its backward.

    Args:
        options: Which outputs are not differentiable or were written, and which tensors were saved for the backward.
    """

    __name__ = "custom_function"

    def __init__(self, options: dict[str, Any]) -> None:
        self.non_differentiable = frozenset(options.get("non_differentiable_idx", ()))
        self.dirty = frozenset(options.get("dirty_idx", ()))
        self.saved = frozenset(options.get("saved_for_backward_idx", ()))

    def __call__(self, forward: fx.GraphModule, backward: fx.GraphModule, *args: Any) -> Any:
        return _Custom.apply(self, forward, backward, *args)


class _Custom(torch.autograd.Function):
    """Saves every tensor through autograd, so that saved-tensor hooks see it, whatever the user's code did."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, function: CustomFunction, forward: fx.GraphModule, backward: fx.GraphModule, *args: Any
    ) -> Any:
        with torch.no_grad():
            output, saved = forward(*args)
        outputs = list(output) if isinstance(output, (tuple, list)) else [output]
        if function.dirty:
            ctx.mark_dirty(*(outputs[i] for i in function.dirty))
        if function.non_differentiable:
            ctx.mark_non_differentiable(*(outputs[i] for i in function.non_differentiable))
        # What the user kept on `ctx` directly is not checked for later changes, so it is saved under another counter.
        kept = [v.data if isinstance(v, Tensor) and i not in function.saved else v for i, v in enumerate(saved)]
        aside = (v for i, v in enumerate(saved) if isinstance(v, Tensor) and i not in function.saved)
        ctx.keeps_differentiable = any(v.requires_grad or any(v is o for o in outputs) for v in aside)
        ctx.save_for_backward(*(v for v in kept if isinstance(v, Tensor)))
        ctx.rest = [None if isinstance(v, Tensor) else (v,) for v in kept]
        ctx.graph = backward
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        is_differentiated = torch.is_grad_enabled()  # before the captured backward, which sets the mode itself
        tensors = ctx.saved_tensors
        rest = iter(tensors)
        saved = [next(rest) if value is None else value[0] for value in ctx.rest]
        found = ctx.graph(*gradients, *saved)
        found = found if isinstance(found, (tuple, list)) else (found,)
        if is_differentiated:
            if ctx.keeps_differentiable:
                raise _twice()
            read = [t for t in (*gradients, *tensors) if isinstance(t, Tensor) and t.requires_grad]
            # What is handed on as it came, a straight-through estimate, say, is differentiated by itself.
            found = [g if g is None or any(g is t for t in gradients) else _Once.apply(g, *read) for g in found]
        return None, None, None, *found


class _Once(torch.autograd.Function):
    """A gradient that is not to be differentiated by what it was computed from."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *read: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise _twice()


def _twice() -> RuntimeError:
    return RuntimeError(
        "the backward of a torch.autograd.Function is differentiated, of which TorchDynamo captures no gradients. "
        "Remedy: leave the module that applies it out of the rewritten modules"
    )


class Checkpointed:
    """A call of `torch.utils.checkpoint.checkpoint` as the user wrote it.

    Args:
        held: Places of the arguments that the module holds (parameters, buffers): the user's function found them by
            itself, and only what was passed to it is saved.
        options: The user's keyword arguments of `checkpoint`.
    """

    __name__ = "checkpoint"

    def __init__(self, held: Collection[int], options: dict[str, Any]) -> None:
        self.held, self.options = frozenset(held), options

    def __call__(self, body: Callable[..., Any], *args: Any) -> Any:
        passed = [i for i in range(len(args)) if i not in self.held]

        def function(*given: Any) -> Any:
            values = list(args)
            for i, value in zip(passed, given, strict=True):
                values[i] = value
            return body(*values)

        given = [args[i] for i in passed]
        args = tuple(a if i in self.held else None for i, a in enumerate(args))  # held by `checkpoint` alone
        return checkpoint(function, *given, **self.options)


_UNEXPLAINED = "assertion error"
"""What TorchDynamo says for an assertion that says nothing."""


def asserted(condition: Tensor, message: str = _UNEXPLAINED) -> None:
    """The assertion of a tensor's value, which a fake one does not have.

    Raises:
        AssertionError: It is false.
    """
    if not isinstance(condition, FakeTensor) and not condition:
        raise AssertionError(*(() if message == _UNEXPLAINED else (message,)))


def returns_nothing(part: fx.Node) -> bool:
    """Whether a call is there for what it does besides computing."""
    if part.target is asserted:
        return True
    schema = getattr(_only_overload(part.target), "_schema", None)
    return schema is not None and not schema.returns


def _only_overload(target: Any) -> Any:
    """The overload of a custom operation that has but one, under which name it is called."""
    if isinstance(target, OpOverloadPacket) and len(names := target.overloads()) == 1:
        return getattr(target, names[0])
    return target


def runnable_as_written(module: fx.GraphModule, values: Sequence[Any]) -> fx.GraphModule:
    """A captured graph that does what the user wrote where it is run as it is.

    Args:
        module: The graph, which stays as it is.
        values: Of its placeholders.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    root = fx.GraphModule(module, graph)
    placeholders = (n for n in root.graph.nodes if n.op == "placeholder")
    owned = [n for n, value in zip(placeholders, values, strict=True) if isinstance(value, nn.Parameter)]
    before = [n.target for n in root.graph.nodes]
    replace_functions(root, owned)
    if before == [n.target for n in root.graph.nodes]:
        return module
    root.recompile()
    return root


def differentiates_in_its_backward(root: fx.GraphModule) -> bool:
    """Whether it calls `checkpoint` in the form that does, so that nothing of it can be recomputed."""
    called = (n.target for n in root.graph.nodes)
    return any(isinstance(target, Checkpointed) and target.options.get("use_reentrant") for target in called)


def replace_functions(root: fx.GraphModule, owned: Collection[fx.Node]) -> list[str]:
    """Puts these in the place of TorchDynamo's targets; a sentence for each call of `checkpoint`.

    Args:
        root: The captured graph, changed here, with the bodies of functions.
        owned: The placeholders that stand for parameters and buffers.
    """
    reasons: list[str] = []
    for n in root.graph.nodes:
        name = getattr(n.target, "__name__", "") if n.op == "call_function" else ""
        if n.target in (torch._assert, torch._assert_async):  # pyright: ignore
            n.target = asserted
        elif name == "autograd_function_apply":
            n.target = CustomFunction(dict(n.kwargs))
            n.kwargs = {}
        elif name == "tag_activation_checkpoint":
            held = [i for i, a in enumerate(n.args[1:]) if a in owned]
            n.target = Checkpointed(held, dict(n.kwargs))
            n.kwargs = {}
            body = getattr(root, str(cast(fx.Node, n.args[0]).target))
            if (context_fn := body.meta.get("_checkpoint_context_fn")) is not None:
                n.target.options["context_fn"] = context_fn
            reasons.append(f"{n.name} calls torch.utils.checkpoint, which stays as it is and runs as one operation")
    return reasons


def may_keep_what_it_reads(part: fx.Node) -> bool:
    """Whether a backward may read an input that autograd was not told to save: kept on `ctx`, or in a closure."""
    return _is_custom(part) or isinstance(part.target, Checkpointed)


def may_draw_unseen(part: fx.Node) -> bool:
    """Whether it may take random numbers that no operation of PyTorch's shows: in code of the user's."""
    return _is_custom(part) or isinstance(part.target, (Checkpointed, CustomFunction))


def _is_custom(part: fx.Node) -> bool:
    target: Any = part.target
    is_registered = isinstance(target, (OpOverload, OpOverloadPacket))
    return is_registered and str(target).partition(".")[0] not in ("aten", "prims")
