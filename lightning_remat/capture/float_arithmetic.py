"""Numbers of Python that change are computed as Python does, step by step.

TorchDynamo has formulas in the place of sizes and of a module's numbers, and simplifies these: `(f + 0.2) - 0.2` is `f`
to it, `f * 3 * 0.1` is `f * 0.3`, which are other numbers in the last bit, and other branches. One operation is exact;
where a result is computed with further, it is a constant from there on, and what it comes from is guarded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import SymFloat, SymInt, fx
from torch._dynamo.variables import ConstantVariable, SymNodeVariable

from .as_in_eager import is_captured_as_eager
from .shared_setting import Exchange

# TorchDynamo's own names; nothing of them is typed.
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false, reportUnknownVariableType=false

_ARITHMETIC: frozenset[Any] = frozenset(
    {
        *(operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.mod, operator.floordiv),
        *(operator.iadd, operator.isub, operator.imul, operator.itruediv),
    }
)


def _step_by_step(create: Any) -> Any:
    own: Callable[..., Any] = create.__func__

    def create_one(cls: type, frame: Any, proxy: Any, sym_num: Any = None, **options: Any) -> Any:
        node: fx.Node = proxy.node
        if node.target in _ARITHMETIC and is_captured_as_eager():
            operands = [a.meta.get("example_value") if isinstance(a, fx.Node) else a for a in node.args]
            if any(map(_is_computed, operands)):
                target: Callable[..., Any] = node.target  # pyright: ignore[reportAssignmentType]
                return ConstantVariable.create(target(*map(_constant, operands)))
        return own(cls, frame, proxy, sym_num, **options)

    return classmethod(create_one)


def _is_computed(operand: Any) -> bool:
    """Whether it is a number with a fraction that comes from others, or is one number: not a size as such a number."""
    if not isinstance(operand, SymFloat):
        return False
    formula = operand.node.expr
    return not (formula.is_Symbol or formula.func.__name__ == "ToFloat")


def _constant(operand: Any) -> Any:
    if isinstance(operand, SymFloat):
        return operand.node.guard_float(__file__, 0)
    return operand.node.guard_int(__file__, 0) if isinstance(operand, SymInt) else operand


CHANGES = [Exchange(SymNodeVariable, "create", _step_by_step)]
