"""A module's forward behind TorchDynamo, which captures graphs, guards them, and captures anew where a guard fails."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo import compiled_autograd, config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.types import (
    ConvertFrameReturn,
    FrameAction,  # pyright: ignore[reportPrivateImportUsage]
    FrameExecStrategy,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..module_state.nesting import tensors_in
from ..module_state.preserve import preserved_own_generators
from ..module_state.refusals import mode_in_the_way, switched_off_by
from ..operations.functions import runnable_as_written
from ..operations.module_hooks import replace_module_hooks
from . import (
    as_in_eager,
    as_written,
    cached_functions,
    compiled_by_users,
    exchanges_left,
    first_calls,
    float_arithmetic,
    generators_left,
    higher_order_left,
    hook_guards,
    in_pythons_order,
    methods,
    numpy_as_it_is,
    quiet,
    synchronized_norms,
)
from .capture_error import CaptureError, SwitchedOffError, exhausted, refuse_values, why
from .methods import Methods
from .shared_setting import Exchange, OnlyHere, SharedSettings

# Of TorchDynamo's own names only these few are used, in this folder alone.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

_numbers = itertools.count(1)

_HAS_ISOLATION = "isolate_recompiles" in signature(torch.compile).parameters  # newer than torch 2.11

_SETTINGS: dict[str, Any] = {
    "allow_rnn": True,  # LSTM and GRU are operations like others
    "enable_dynamo_decompositions": False,  # `add_(x, alpha=0.1)` as two operations has other bits
    "allow_unspec_int_on_nn_module": True,  # a counter on a module is an input once it has changed
    "use_graph_deduplication": False,  # what repeats would be a graph within the graph
    "optimize_ddp": False,  # an eager backward needs no division at DDP's buckets
    "automatic_dynamic_local_pgo": False,  # what another run of this program saw decides nothing here
    "skip_nnmodule_hook_guards": False,  # a hook registered later still fires
    "skip_guards_on_constant_func_defaults": False,  # else torch 2.11 writes a list among them nowhere
}

if torch.__version__ < "2.13":  # a parameter that is frozen meanwhile would not be seen
    _SETTINGS["skip_tensor_guards_with_matching_dict_tags"] = False

_FUNCTIONS_OF_TENSORS = cast(Any, Tensor).__torch_function__.__func__, cast(Any, nn.Parameter).__torch_function__

_MOST_GRAPHS = 16
"""Of one module, before it is captured no more."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CapturedGraph:
    """What TorchDynamo handed over.

    Attributes:
        module: The graph, with what it fetches by `get_attr`; its placeholders are all that may differ from call to
            call: inputs, parameters, buffers, numbers.
        code: What it was captured from: the forward, or a function that runs between the graphs of one.
        number: Those captured later have larger ones.
    """

    module: fx.GraphModule
    code: types.CodeType | None = None
    number: int = field(default_factory=partial(next, _numbers), init=False)
    _as_written: list[fx.GraphModule] = field(default_factory=list[fx.GraphModule], init=False, repr=False)

    def run(self, values: Sequence[Any]) -> Any:
        """What it computes, where it is not planned: as the user wrote it."""
        if not self._as_written:
            self._as_written.append(runnable_as_written(self.module, values))
        return self._as_written[0](*values)

    @property
    def graph(self) -> fx.Graph:
        """Its nodes."""
        return self.module.graph


def between_captures() -> int:
    """A number larger than those of the graphs that have been captured, and smaller than those of later ones."""
    return next(_numbers)


class _Bound(BaseException):
    """Ends a call that is only made to see with which values a graph would run."""

    def __init__(self, graph: CapturedGraph, values: list[Any]) -> None:
        super().__init__()
        self.graph, self.values = graph, values


def _template(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return captured_forward(self, *args, **kwargs)  # noqa: F821 - each copy has globals of its own  # pyright: ignore


Run = Callable[[CapturedGraph, list[Any]], Any]
"""Runs a captured graph on the values of its placeholders; returns what the graph returns."""


class CompiledForward:
    """The forward of a module, captured by TorchDynamo on its first call and whenever a guard fails.

    It has a code object of its own, so that what TorchDynamo has learnt of other modules of the class, and how often
    it captured those, has no part in it, and so that all of it goes with this object; but for the guards of pieces,
    which stay with the user's code.

    Args:
        forward: The function, which takes the module first.
        is_whole: Whether it must be one graph. Else what cannot be captured runs as it is between several.
        num_modules: How many modules share it.

    Attributes:
        function: That function.
        is_whole: Whether it must be one graph.
        is_exhausted: Whether it has been captured so often that TorchDynamo will not capture it again.
        has_hooks: Whether submodules have backward hooks, which must then be captured; they divide a forward otherwise.
    """

    def __init__(self, forward: Callable[..., Any], *, is_whole: bool = True, num_modules: int = 1) -> None:
        self.function, self.is_whole = forward, is_whole
        # What TorchDynamo itself fails at runs as it is, too, where there may be several graphs.
        self._settings = _SETTINGS | {"recompile_limit": _MOST_GRAPHS * num_modules, "suppress_errors": not is_whole}
        self.is_exhausted = self.has_hooks = False
        # By whether hooks of submodules are guarded, which is less to ask where there are none; and by those that all
        # modules have, and methods that are others than when they were captured, which TorchDynamo does not guard.
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._methods = Methods()
        self._local = threading.local()
        # Held here alone: a forward in pieces is captured in the user's code, too.
        self._graphs: list[CapturedGraph] = []

    def _entry(self, *, are_hooks_guarded: bool) -> Callable[..., Any]:
        name, qualified_name = f"forward_{next(_numbers)}", self.function.__qualname__
        code = _template.__code__.replace(co_name=name, co_qualname=qualified_name)
        names = {"captured_forward": self.function, "__name__": __name__, "__builtins__": __builtins__}
        options: dict[str, Any] = {"isolate_recompiles": True} if _HAS_ISOLATION else {}
        with config.patch(compiled_autograd=False):  # a backward within the forward is no code that users compile
            # TorchDynamo keeps who makes and runs its graphs with the code, which may not keep this object.
            backend: Any = partial(_captured, weakref.ref(self))
            context: Any = torch._dynamo.optimize(backend, nopython=self.is_whole, **options)
        if (capture := getattr(context, "callback", None)) is not None:  # else TorchDynamo is switched off
            context.callback = _Capturing(capture, partial(self._capturing, are_hooks_guarded=are_hooks_guarded))
        weakref.finalize(self, reset_code, code).atexit = False  # TorchDynamo lets go of no code that it has captured
        return context(types.FunctionType(code, names))

    def backend(self, module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """What runs a graph that TorchDynamo has captured."""
        if self.is_whole:
            refuse_values(module.graph)
        if self.has_hooks:
            replace_module_hooks(module.graph)
            module.recompile()
        _put_inputs_first(module.graph)
        is_inlined = any(map(_has_functions_of_its_own, examples))
        self._graphs.append(CapturedGraph(module, self._local.code))
        return partial(_called, self._local, weakref.ref(self._graphs[-1]), is_inlined)

    @contextmanager
    def _capturing(self, code: types.CodeType, *, are_hooks_guarded: bool) -> Generator[None]:
        """What must hold while TorchDynamo captures for the call of this thread; a call that it knows needs none."""
        self._local.code = code
        _, args, kwargs = self._local.call
        settings = self._settings | {"ignore_logging_functions": _ignored_functions()}
        hooks = _HOOKS_CAPTURED.wanted() if self.has_hooks else nullcontext()
        told = as_in_eager.as_in_eager(tensors_in((args, kwargs)))
        with (
            config.patch(settings),
            _WHILE_CAPTURING.wanted(),
            hooks,
            told,
            hook_guards.hooks_guarded(are_hooks_guarded),
            self._methods.noted(),
        ):
            yield

    def call(self, run: Run, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's results, its graph run by `run`.

        Raises:
            CaptureError: The forward with these arguments is no single graph; nothing of it has run.
        """
        if (reason := mode_in_the_way()) is not None:
            raise CaptureError(reason, None)
        before, self._local.call = getattr(self._local, "call", None), (run, args, kwargs)
        try:
            # Between graphs, modules may be called that are none of its submodules.
            are_guarded = not self.is_whole or hook_guards.has_hooked_submodules(module)
            key = are_guarded, hook_guards.hooks_of_all_modules(), self._methods.replaced()
            compiled = self._compiled.get(key)
            if compiled is None:
                if len(self._compiled) == _MOST_GRAPHS:
                    self.is_exhausted = True
                    what = "methods of classes" if key[-1] else "the hooks of all modules"
                    reason = f"{what} have been others {_MOST_GRAPHS} times"
                    raise CaptureError(reason, None, is_final=True)
                compiled = self._compiled[key] = self._entry(are_hooks_guarded=are_guarded)
            return compiled(module, *args, **kwargs)
        except FailOnRecompileLimitHit as error:
            self.is_exhausted = True
            reason = f"it has done something new {_MOST_GRAPHS} times"
            raise CaptureError(reason, None, is_final=True) from error
        except TorchDynamoException as error:
            # A frame of TorchDynamo keeps this error, which keeps it, and with it all frames around: those of the step.
            traceback.clear_frames(error.__traceback__)
            raise why(error, is_final=self.is_exhausted) from error
        finally:
            self._local.call = before

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CapturedGraph, list[Any]]:
        """The graph of a call and the values of its placeholders; nothing is run or changed.

        But for what a first call does before all else, where it stands in the way.

        Raises:
            CaptureError: The forward with these arguments is no single graph, or an empty one.
        """
        with first_calls.met() as waiting:
            try:
                return self._bound(module, args, kwargs)
            except CaptureError:
                if not waiting:
                    raise
            for first_call in waiting:
                first_call()
        return self._bound(module, args, kwargs)

    def _bound(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CapturedGraph, list[Any]]:
        if (switch := switched_off_by()) is not None:
            raise SwitchedOffError(f"TorchDynamo is switched off by {switch}", None)
        python_state = random.getstate()  # what Python draws is drawn before the graph runs
        try:
            with torch.enable_grad(), preserved_own_generators(module), _dynamic(tensors_in((args, kwargs))):
                self.call(_end_here, module, args, kwargs)
        except _Bound as bound:
            return bound.graph, bound.values
        except CaptureError:
            raise
        except Exception as error:  # the user's, or TorchDynamo's: the plain run will tell
            raise why(error) from error
        finally:
            random.setstate(python_state)
        raise CaptureError("it computes nothing", None)


def _captured(forward: weakref.ref[CompiledForward], module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    owner = forward()
    assert owner is not None, "nobody calls it"
    return owner.backend(module, examples)


def _called(local: threading.local, graph: weakref.ref[CapturedGraph], is_inlined: bool, *values: Any) -> Any:
    # What subclasses have in place of functions is in the graph: torch 2.11 would call it once more.
    with torch._C.DisableTorchFunctionSubclass() if is_inlined else nullcontext():
        return local.call[0](graph(), list(values))


def _has_functions_of_its_own(value: Any) -> bool:
    """Whether what is in the graph stands for functions of a subclass; one that wraps others is called there."""
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        return False
    given = cast(Any, type(value)).__torch_function__
    return getattr(given, "__func__", given) not in _FUNCTIONS_OF_TENSORS


def _put_inputs_first(graph: fx.Graph) -> None:
    """Before what reads them: torch 2.11 puts a size that only hooks of tensors read behind some of these."""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    for late in graph.find_nodes(op="placeholder"):
        if first < late:
            first.prepend(late)


_WHILE_CAPTURING = SharedSettings(
    *quiet.CHANGES,
    *as_in_eager.CHANGES,
    *as_written.CHANGES,
    *cached_functions.CHANGES,
    *compiled_by_users.CHANGES,
    *float_arithmetic.CHANGES,
    *generators_left.CHANGES,
    *numpy_as_it_is.CHANGES,
    *in_pythons_order.CHANGES,
    *hook_guards.CHANGES,
    *synchronized_norms.CHANGES,
    *exchanges_left.CHANGES,
    *higher_order_left.CHANGES,
    *first_calls.CHANGES,
    *methods.CHANGES,
)


class _Capturing:
    """TorchDynamo's callback for code of which no capture holds, within settings that nothing else is to notice.

    Args:
        capture: The callback.
        settings: Makes the context, given the code.
    """

    def __init__(self, capture: Any, settings: Callable[[types.CodeType], AbstractContextManager[None]]) -> None:
        self._capture, self._settings = capture, settings
        self._torchdynamo_orig_backend = capture._torchdynamo_orig_backend  # by which it tells captures apart

    def __call__(self, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if (found := higher_order_left.left(frame)) is not None:
            return found
        with self._settings(frame.f_code):
            found = self._capture(frame, *args, **kwargs)
        if found.frame_exec_strategy.cur_action == FrameAction.RUN_ONLY:
            warnings.warn(exhausted(frame.f_code, _MOST_GRAPHS), stacklevel=2)
            if not _HAS_ISOLATION:  # what fits would run from now on, by whomever it was captured
                return ConvertFrameReturn(FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT), apply_to_code=False)
        return found


# Lets TorchDynamo capture backward hooks of modules, as it does where compiled autograd would run them.
_HOOKS_CAPTURED = SharedSettings(Exchange(compiled_autograd, "compiled_autograd_enabled", partial(OnlyHere, here=True)))


def _ignored_functions() -> set[Callable[..., Any]]:
    """What libraries add to loggers to say something once: such a line is left out, where others divide a forward.

    transformers has one in the loss of each model whose configuration names none.
    """
    once = {f for name, f in vars(logging.Logger).items() if name.endswith("_once")}
    return {*once, as_in_eager.NOTE_FOR_COMPILERS, *config.ignore_logging_functions}


def _end_here(graph: CapturedGraph, values: list[Any]) -> Any:
    raise _Bound(graph, values)


@contextmanager
def _dynamic(tensors: Iterable[Tensor]) -> Generator[None]:
    """Lets a graph hold for all batch sizes where it can: the first dimension of inputs may change."""
    marks: list[tuple[Tensor, str]] = []  # by which names depends on the version of torch
    for t in tensors:
        if t.dim() and not hasattr(t, "_dynamo_weak_dynamic_indices"):
            before = {*vars(t)}
            torch._dynamo.maybe_mark_dynamic(t, 0)
            marks += [(t, name) for name in vars(t).keys() - before]
    try:
        yield
    finally:
        for t, name in marks:
            vars(t).pop(name, None)
