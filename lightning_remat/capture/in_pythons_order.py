"""What a forward walks through comes in Python's order: of sets, which have their own, and of ordered dictionaries.

Python has a set in the order of hashes and of what the set went through, TorchDynamo in that in which things were put
in, or in which they came when it captured: losses summed over `a.keys() & b.keys()` would have other bits. So a
function that walks a set, takes something out of it, or changes one that is held, runs as it is; those of libraries
are captured, which hold sets of names. An ordered dictionary that is held is written as a whole: TorchDynamo would only
write what is new in it, and not where it stands.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import FrozensetVariable, SetVariable

from .as_in_eager import is_captured_as_eager
from .divisions import is_own_frame, run_as_it_is
from .shared_setting import Exchange

# TorchDynamo's own names; nothing of them is typed.
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false, reportOptionalMemberAccess=false

_WALKS = ("unpack_var_sequence", "tp_iter_impl", "reconstruct", "call_method")
"""Where TorchDynamo's order shows, so where a graph ends: the set is made anew for what follows."""

_METHODS = ("pop", "__iter__")
"""Of Python's sets, in which it shows."""


def _unless_of_a_set(walk: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(walk)
    def walk_through(value: Any, *args: Any, **kwargs: Any) -> Any:
        shows = walk.__name__ != "call_method" or args[1] in _METHODS
        if shows and _is_set(value) and len(value.items) > 1 and is_captured_as_eager():
            frame: Any = getattr(args[0], "tx", args[0])  # of what makes the code
            if is_own_frame(frame):
                run_as_it_is(value.python_type().__name__, "a set is walked whose order Python alone knows:")
        return walk(value, *args, **kwargs)

    return walk_through


def _unless_of_a_held_set(mutation: Callable[..., None]) -> Callable[..., None]:
    @wraps(mutation)
    def noted(effects: SideEffects, changed: Any) -> None:
        if changed.source is not None and is_captured_as_eager():
            if _is_set(changed) and is_own_frame(effects.output_graph_weakref().current_tx):
                run_as_it_is("set", "a set is changed whose order Python alone knows:")
            held = getattr(changed, "_base_vt", None) or changed
            if hasattr(held, "should_reconstruct_all") and changed.python_type() is OrderedDict:
                held.should_reconstruct_all = True
        mutation(effects, changed)

    return noted


def _is_set(value: Any) -> bool:
    """Whether TorchDynamo has it in the place of one of Python's."""
    return isinstance(value, SetVariable | FrozensetVariable) and value.python_type() in (set, frozenset)


def _exchanges() -> list[Exchange]:
    """One for each place where such a walk is written: that differs from version to version."""
    kinds = (SetVariable, FrozensetVariable)
    found = (next(((c, name) for c in kind.__mro__ if name in vars(c)), None) for kind in kinds for name in _WALKS)
    return [Exchange(*place, _unless_of_a_set) for place in dict.fromkeys(found) if place is not None]


CHANGES = [*_exchanges(), Exchange(SideEffects, "mutation", _unless_of_a_held_set)]
