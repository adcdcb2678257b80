"""Looks through a training step for the calls that rematerialization can serve."""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..capture.dynamo import CapturedGraph, Run, between_captures
from ..capture.forwards import forward_of, share_forwards
from ..capture.synchronized_norms import unsynchronized
from ..errors import TraceError
from ..measure.meter import tensor_storage
from ..measure.out_of_memory import is_out_of_memory
from ..measure.tensor_bytes import logical_bytes
from ..module_state.agreement import OtherRankError, all_ranks, together
from ..module_state.ambient import Ambient
from ..module_state.batches import as_new, cut_from_history, tensors_held
from ..module_state.nesting import extents_of, flatten, tensors_in
from ..module_state.refusals import in_the_way, mode_in_the_way
from ..module_state.sharding import gathered_modules, gathering_units, settled
from ..operations.saved_tensors import storage_keys
from .calls import Call, Moment, Part, Returned, View
from .chosen_modules import divided, resolved, submodules
from .given_gradients import note_gradients, note_together
from .phases import Backwards, Span, alive_together
from .saved_between import SavedBetween, Staying, most_bytes_between
from .transforms import hooks_outside_transforms

_MOST_LOOKS = 4
"""At a step in which captured graphs are overtaken by more general ones."""

_MOST_SIZES = 8
"""At which one graph is planned; what it needs at further ones is taken to be what it needs at the last."""

_SEEN, _OUTDATED, _DIFFERENTIATES, _FAILED = range(4)
"""What came of a look, as processes tell each other: the gravest counts."""


class NoCallError(ValueError):
    """A step calls nothing that rematerialization can serve."""


def look_through(
    root: nn.Module,
    step: Callable[[], object],
    modules: Sequence[Any] | None = None,
    *,
    may_nest: bool = False,
    undone: Callable[[], AbstractContextManager[object]] = nullcontext,
    differentiating: Callable[[], object] | None = None,
    again_after: tuple[type[Exception], ...] = (),
    is_known_to_differentiate: bool = False,
    backwards: Backwards | None = None,
    agree: Callable[[int], int] | None = None,
) -> View:
    """The calls that rematerialization can serve, in the order in which `step` makes them, and what lies between.

    Those are the outermost calls of submodules that own a parameter, be it frozen, and return something to
    differentiate; where submodules are named, those of their calls that return something to differentiate. Where the
    root's own `forward` only hands its input to one submodule, that one is taken. Nothing that autograd saves is kept
    meanwhile, so a step that does not fit can be looked through. Only one that differentiates by itself fails at that,
    and is run once more with all that it saves, from the state that the first run began with.

    What TorchDynamo captured with a size or a number as a constant it captures more generally at the next one, and that
    graph serves the first call too when the step is run again. Such a step is run until it runs the graphs that all
    further ones will.

    Of calls between which a backward lies, those are left out that others stand for (see `alive_together`).

    Args:
        root: The module whose submodules are watched; all processes that share it run its steps together.
        step: Runs the forward of one training step.
        modules: Submodules, or their names, to watch instead of the outermost ones. Of a name with a number in
            brackets, as `"net[0]"`, the graphs that TorchDynamo captures of the submodule's forward are the calls.
        may_nest: Whether these may lie inside one another, as may what a step was seen to call by itself.
        undone: What each run happens in: puts back what it changes.
        differentiating: What is run the second time, where that is something else.
        again_after: Errors after which it is run a second time, besides that of a derivative of which nothing is saved.
        is_known_to_differentiate: Whether the first run is left out.
        backwards: Is told by the step where a backward would run that is left out.
        agree: The largest of the numbers that it is given by all processes that run the step, so that all run it again
            where one has to; None for those that share the root.

    Raises:
        NoCallError: The step makes no such call.
        OtherRankError: It fails on another process.
        ValueError: `modules` names what the root does not have.
    """
    agree = agree or (lambda value: max(all_ranks(root, value)))
    again = (_NothingHeldError, *again_after)
    holds, num_looks = is_known_to_differentiate, 0

    def look() -> View:
        run = (differentiating or step) if holds else step
        with undone(), unsynchronized():
            return _look_through(root, run, modules, backwards or Backwards(), holds=holds, may_nest=may_nest)

    while True:
        num_looks += 1
        try:
            view = together(root, look, is_out_of_memory)
        except OtherRankError:  # others are in the midst of the step
            raise
        except Exception as error:
            if holds or not isinstance(error, again):
                agree(_FAILED)
                raise
            found = agree(_DIFFERENTIATES)
        else:
            found = agree(_OUTDATED if view.is_outdated and num_looks < _MOST_LOOKS else _SEEN)
            if found == _SEEN:
                return view
            del view  # it holds the arguments of all calls
        if found == _FAILED:
            raise OtherRankError("the step has failed on another process, which tells why")
        if found == _DIFFERENTIATES:
            holds, num_looks = True, 0


def _look_through(
    root: nn.Module,
    step: Callable[[], object],
    modules: Sequence[Any] | None,
    backwards: Backwards,
    *,
    holds: bool,
    may_nest: bool,
) -> View:
    names = {m: name for name, m in reversed(submodules(root))}
    in_graphs, whole = divided(modules)
    in_parts = list(dict.fromkeys(resolved(root, names, in_graphs, may_nest=may_nest))) if in_graphs else []
    watched = [m for m in resolved(root, names, whole, may_nest=may_nest) if m not in in_parts]
    gathered = gathered_modules(root)
    share_forwards(m for m in watched if m in gathered)
    begun = between_captures()
    ran: dict[CapturedGraph, Hashable] = {}
    top = _Frame(root, (), {})  # stands for the step itself
    frames = [top]
    owned = storage_keys([*root.parameters(), *root.buffers()])
    backwards.begin()
    # Of each phase from one backward to the next.
    between = defaultdict[int, list[SavedBetween]](lambda: [SavedBetween(owned)])

    def saved_now() -> SavedBetween:
        """Where to note what is saved now: a call that turns out to be none that can be served is code between."""
        return between[backwards.before_now()][0] if len(frames) == 1 else frames[1].saved

    staying, outside, moments = Staying(), Staying(), list[Moment]()

    def begin_unit(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        has_gradient = any(t.requires_grad for t in tensors_in((args, kwargs)))
        moments.append(Moment(module, next(top.clock), True, has_gradient))
        for place in (between[backwards.before_now()][0], saved_now()):
            place.own(module.parameters())  # as gathered, which are others than the shards

    def end_unit(module: nn.Module, _args: Any, _output: Any) -> None:
        moments.append(Moment(module, next(top.clock), False, True))

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # By a function that users have compiled, which stays so; a copy has what its module bears meanwhile.
        if torch.compiler.is_compiling() or module not in names:
            return
        is_outermost = len(frames) == 1
        frames.append(frames[-1].call(module, args, kwargs, backwards.called() if is_outermost else None))
        if is_outermost:
            frames[-1].saved = SavedBetween(owned)
        if is_outermost and module in gathered and torch.is_grad_enabled():
            frames[-1].part = Part.of_whole(module, args, kwargs)

    def leave(module: nn.Module, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or module not in names:
            return
        frame = frames.pop()
        if in_the_way() is None:  # else it runs plain, and cannot be served
            leave_by(frame, output)

    def leave_by(frame: _Frame, output: Any) -> None:
        frame.leave(output, is_named=modules is not None)
        if len(frames) == 1:
            backwards.awaited(frame.span, tensors_held(output))

    def run_part(module: nn.Module, graph: CapturedGraph, values: list[Any]) -> Any:
        ran.setdefault(graph, _kinds_of(values))
        if len(frames) > 1 or not torch.is_grad_enabled():
            return graph.run(values)
        held = {id(t) for t in (*module.parameters(), *module.buffers())}
        args = tuple(v for v in values if isinstance(v, Tensor) and id(v) not in held)
        frames.append(top.call(module, args, {}, backwards.called()))
        frames[-1].part = Part(graph, values)
        output = graph.run(values)
        leave_by(frames.pop(), output)
        return output

    def note(tensor: Tensor) -> Tensor | None:
        returned = [made.storage for frame in top.children if frame.is_served for made in frame.outputs]
        saved_now().note(tensor, returned)
        staying.note([tensor])
        if len(frames) == 1:
            outside.note([tensor])
        return tensor.detach() if holds else None  # what saves its own result would hold itself

    def unpack(held: Tensor | None) -> Tensor:
        if held is None:
            raise _NothingHeldError("it differentiates within its forward, where nothing is held")
        backwards.runs(retains_graph=torch.is_grad_enabled())
        return held

    pack: Any = cast(Any, torch.compiler).disable(note)  # TorchDynamo would capture it

    with ExitStack() as undo:
        for module in in_parts:
            vars(module)["forward"] = partial(_run_in_parts, module, partial(run_part, module))
            undo.callback(vars(module).pop, "forward")
        for module in gathering_units(root):
            undo.enter_context(module.register_forward_pre_hook(begin_unit, with_kwargs=True))
            undo.enter_context(module.register_forward_hook(end_unit))
        for module in watched:
            undo.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
            undo.enter_context(module.register_forward_hook(leave))
        # The graph that the step has made holds the hooks, and through them what is noted here.
        undo.callback(frames.clear)
        undo.callback(top.children.clear)
        with settled(root), torch.enable_grad(), hooks_outside_transforms(pack, unpack):
            made = step()  # and with it what leads to it, which tells whose backward comes
            for tensor in tensors_held(made):  # alive beside the calls, as what the code between them saves
                note(tensor)
            if not (holds or moments or backwards.before_now()):
                note_gradients(tensors_held(made), {frame.span: frame.outputs for frame in top.children}, outside)
        chosen = _chosen(top, names, watched, modules, root)
        if not moments:
            phases = alive_together((frame.span, frame.what, frame.args, frame.kwargs) for frame in chosen)
            chosen = [frame for frame in chosen if frame.span.begun in phases]
        calls = [_as_call(frame, name) for frame, name in zip(chosen, _names(chosen, names), strict=True)]
        inputs = tensors_held([(call.args, call.kwargs) for call in calls])
        for frame in top.children:
            if not frame.is_served and frame.is_differentiable:
                between[frame.span.begun].append(frame.saved)
        saved_bytes = most_bytes_between([frame.span for frame in chosen], between, inputs)
    note_together(calls)
    del chosen  # each of which holds what leads to the call before
    calls, is_outdated = [replace(call, is_over=call.span.is_over) for call in calls], _is_overtaken(ran, begun)
    return View(calls, saved_bytes, staying, tuple(moments), differentiates=holds, is_outdated=is_outdated)


def _is_overtaken(ran: Mapping[CapturedGraph, Hashable], begun: int) -> bool:
    """Whether a graph was captured, since the step has begun, that may serve where another had run in it before.

    Args:
        ran: The graphs in the order of their first runs, and the kinds of what they ran on.
        begun: The number at which the step began.
    """
    earlier: set[Hashable] = set()
    for graph, kinds in ran.items():
        if (graph.code, kinds) in earlier and graph.number > begun:
            return True
        earlier.add((graph.code, kinds))
    return False


def _kinds_of(values: list[Any]) -> Hashable:
    """Of the tensors among a graph's values, what is never another where it runs; numbers may be tensors, too."""
    return tuple((t.dtype, t.device, t.dim(), t.requires_grad) for t in tensors_in(values) if t.dim())


def _chosen(
    top: _Frame,
    names: dict[nn.Module, str],
    watched: Sequence[nn.Module],
    modules: Sequence[Any] | None,
    root: nn.Module,
) -> list[_Frame]:
    chosen = [frame if modules is not None else _through(frame) for frame in top.children if frame.is_served]
    if not chosen:
        what = "none of modules=" if modules is not None else "no submodule with parameters"
        raise NoCallError(
            f"training_step calls {what}{[names[m] for m in watched] if modules is not None else ''}, or only where it "
            "stays as it is, in compiled functions, transforms, modes, copies: name what it calls with modules=, from "
            f"{[name for name, _ in root.named_children()]}"
        )
    return chosen


def _run_in_parts(module: nn.Module, run: Run, *args: Any, **kwargs: Any) -> Any:
    if mode_in_the_way() is not None:  # nothing is captured
        return cast(Any, type(module)).forward(module, *args, **kwargs)
    return forward_of(module, is_whole=False).call(run, module, args, kwargs)


def _names(frames: Sequence[_Frame], names: Mapping[nn.Module, str]) -> Iterator[str]:
    """The name of each call; a graph within a forward has its place in the order of the step's first calls.

    The place, since another batch size may make TorchDynamo capture the same operations as other graphs. Where it is
    called at several sizes, each needs memory of its own: it has the place of that, from the second one on.
    """
    places: dict[nn.Module, dict[CapturedGraph, int]] = {}
    sizes: dict[CapturedGraph, dict[tuple[int, ...], int]] = {}
    for frame in frames:
        name = names[frame.module]
        if frame.part is not None and frame.part.graph is not None and not frame.part.is_whole:
            own = places.setdefault(frame.module, {})
            place = own.setdefault(frame.part.graph, len(own))
            of_graph = sizes.setdefault(frame.part.graph, {})
            size = of_graph.setdefault(extents_of(frame.part.values), min(len(of_graph), _MOST_SIZES - 1))
            name = f"{name}[{place}:{size + 1}]" if size else f"{name}[{place}]"
        yield name


def at_first_size(name: str) -> str:
    """The name of the call of the same graph at the first of its sizes."""
    return name.rpartition(":")[0] + "]" if name.endswith("]") and ":" in name else name


def _as_call(frame: _Frame, name: str) -> Call:
    """The call with what comes into it cut from its history, in its part too."""
    cut = cut_from_history(frame.given)
    args, kwargs = as_new(frame.given, cut)
    part = frame.part and replace(frame.part, values=[cut.get(id(v), v) for v in frame.part.values])
    place = frame.outputs, part, frame.tick, frame.span, frozenset(frame.within())
    return Call(name, frame.module, args, kwargs, frame.ambient, *place)


class _NothingHeldError(TraceError):
    """The step differentiates within its forward."""


class _Frame:
    """A call on the stack of calls, with the watched calls inside it.

    Only the outermost calls, and those that merely get an outermost one's arguments, hold tensors.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs
        self.given = as_new((args, kwargs))  # which the call may take apart
        types = {t.device.type for t in tensors_held((args, kwargs))}
        self.ambient = Ambient.current(sorted({"cpu", *types} - {"meta"}))
        self.part: Part | None = None
        self.children: list[_Frame] = []
        self.is_handed_on = False  # gets just what its caller got
        self.is_differentiable = self.is_served = False
        self.saved = SavedBetween(())
        self.outputs: tuple[Returned, ...] = ()
        self._output: Callable[[], Any] = lambda: None
        self.clock, self.tick = itertools.count(), 0
        self.span = Span()

    @property
    def what(self) -> tuple[nn.Module, CapturedGraph | None]:
        """What is called: a module, or one of the graphs of its forward."""
        return self.module, self.part and self.part.graph

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outermost: Span | None) -> _Frame:
        """A call in this one, which is an outermost one where it has a span of its own."""
        mine, theirs = flatten((self.args, self.kwargs))[0], flatten((args, kwargs))[0]
        is_handed_on = bool(mine) and [id(leaf) for leaf in mine] == [id(leaf) for leaf in theirs]
        holds = outermost is not None or is_handed_on
        frame = _Frame(module, args if holds else (), kwargs if holds else {})
        frame.is_handed_on, frame.tick, frame.span = is_handed_on, next(self.clock), outermost or self.span
        self.children.append(frame)
        return frame

    def within(self) -> Iterator[nn.Module]:
        """The modules of all calls inside it."""
        for frame in self.children:
            yield frame.module
            yield from frame.within()

    def leave(self, output: Any, *, is_named: bool) -> None:
        """It has returned; of one that was not asked for by name the module must be more than a function."""
        tensors = tensors_held(output)
        self.is_differentiable = any(t.requires_grad for t in tensors)
        self.is_served = self.is_differentiable and (is_named or any(True for _ in self.module.parameters()))
        self.outputs = tuple(
            Returned(weakref.ref(s), s.nbytes(), logical_bytes([t]) if t.requires_grad else 0)
            for t in tensors
            if (s := tensor_storage(t)) is not None
        )
        if isinstance(output, Tensor):
            # Where the only call inside returned the very same tensor, this one does nothing of its own.
            inner = self.children[0]._output() if len(self.children) == 1 else None
            self.is_mere_caller = inner is output
            self._output = weakref.ref(output)

    is_mere_caller = False


def _through(frame: _Frame) -> _Frame:
    """The call that a `forward` merely passes on to, where it does nothing else."""
    while frame.is_mere_caller and frame.children[0].is_handed_on and frame.children[0].is_served:
        frame = frame.children[0]
    return frame
