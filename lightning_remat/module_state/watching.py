"""A mode of PyTorch's that sees all operations that run inside, those of functions that operators call among them."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, cast

from torch._ops import HigherOrderOperator, OperatorBase
from torch.utils._python_dispatch import TorchDispatchMode


class WatchingMode(TorchDispatchMode):
    """Is told of every operation inside, and may run it otherwise."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """TorchDynamo may capture, or choose a graph, inside: this mode changes nothing of what is captured."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation; what an operator calls is seen by this mode in its turn."""
        del types
        named = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self.calls(func, args, named)
        return self.runs(func, args, named)

    @abstractmethod
    def runs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation."""

    def calls(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator that calls functions: `torch.cond`, a loop, `flex_attention`."""
        given = [self._watched(a) for a in args]
        named = {name: self._watched(a) for name, a in kwargs.items()}
        return cast(Any, func)(*given, **named)

    def _watched(self, argument: Any) -> Any:
        if not callable(argument) or isinstance(argument, OperatorBase):  # an operation is seen as such
            return argument

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return argument(*args, **kwargs)

        return watched
