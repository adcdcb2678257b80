"""How a tensor that autograd saved of an operation is reached from what the operation returned, without hooks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from .operation import Operation
from .saved_tensors import saved_values, storage_key

num_holders = cast("Callable[[int], int]", torch._C._storage_Use_Count)  # pyright: ignore
"""Of a storage, by its address."""


class Route(NamedTuple):
    """The way from what an operation returned, by nodes of autograd's graph, to a tensor that the last one holds.

    Attributes:
        steps: What is written after one to read the next, as `.grad_fn`, `.next_functions[0][0]`.
        kinds: The types of the nodes.
        end: What is written after the last of them, as `._saved_result`.
    """

    steps: tuple[str, ...]
    kinds: tuple[type, ...]
    end: str


_RECORDED_ALIKE = frozenset[Any](
    {
        *(torch.lstm_cell, torch.gru_cell, functional.cross_entropy, functional.nll_loss),
        *(functional.layer_norm, torch.layer_norm, functional.group_norm, torch.group_norm),
        *(functional.batch_norm, torch.batch_norm, functional.dropout, torch.dropout, functional.alpha_dropout),
        *(functional.relu, torch.relu, torch.relu_, "relu", "relu_", functional.leaky_relu, functional.elu),
        *(functional.silu, functional.hardtanh, functional.relu6, functional.hardswish),
        functional.scaled_dot_product_attention,
    }
)


def is_recorded_alike(operation: Operation) -> bool:
    """Whether autograd records the same graph of an operation whatever the sizes, so that routes lead to the same.

    Almost always so of attention: where it chooses another of its kernels, the nodes on the routes are of other kinds.
    """
    return all(part.target in _RECORDED_ALIKE for part in operation.parts if part not in operation.effects)


def routes_to_storages(made: Mapping[str, Tensor], since: int) -> dict[int, Route]:
    """The shortest route to each storage that autograd holds for the backward of the operation that made these.

    Of what a function of the user's saves, and of what has been written since, there is none.

    Args:
        made: The tensors that the operation returned, by what is written after what it returned to read each.
        since: The sequence number of the first of its nodes.
    """
    found: dict[int, Route] = {}
    seen: set[Any] = set()
    waiting = deque[tuple[Any, tuple[str, ...], tuple[type, ...]]](
        (t.grad_fn, (f"{part}.grad_fn",), ()) for part, t in made.items()
    )
    while waiting:
        node, steps, kinds = waiting.popleft()
        if node is None or node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        kinds = *kinds, cast(Any, type)(node)
        if not isinstance(node, torch.autograd.function.BackwardCFunction):
            for end, tensor in _saved_in(node):
                if (key := storage_key(tensor)) is not None:
                    found.setdefault(key, Route(steps, kinds, end))
        for k, (following, _) in enumerate(node.next_functions):
            waiting.append((following, (*steps, f".next_functions[{k}][0]"), kinds))
    return found


class Found(NamedTuple):
    """What routes lead to, in their order.

    Attributes:
        tensors: That autograd saved.
        storages: Their own.
        sizes: Of these, in bytes.
        holders: How many hold each of the tensors, and how many each of the storages.
    """

    tensors: list[Tensor]
    storages: list[torch.UntypedStorage]
    sizes: list[int]
    holders: list[int]


def reader_of(routes: Iterable[Route]) -> Callable[[Any], Found | None]:
    """What goes all the routes from what an operation returned, what they share once, without loops.

    It answers None where a route leads elsewhere this time: no gradients are asked for, or the operation chose another
    kernel.
    """
    namespace: dict[str, Any] = {"Found": Found, "num_holders": num_holders}
    names: dict[tuple[str, ...], str] = {}
    lines: list[str] = []
    ends: list[str] = []
    for route in routes:
        node = "made"
        for k, (step, kind) in enumerate(zip(route.steps, route.kinds, strict=True), 1):
            way = route.steps[:k]
            if way not in names:
                names[way] = f"n{len(names)}"
                namespace[f"kind_of_{names[way]}"] = kind
                lines.append(f"if type({names[way]} := {node}{step}) is not kind_of_{names[way]}: return None")
            node = names[way]
        ends.append(str(len(ends)))
        lines.append(f"if (t{ends[-1]} := {node}{route.end}) is None: return None")
        lines.append(f"s{ends[-1]} = t{ends[-1]}.untyped_storage()")
    listed = ", ".join
    tensors, storages = (listed(f"{kind}{end}" for end in ends) for kind in "ts")
    sizes = listed(f"s{end}.nbytes()" for end in ends)
    holders = listed((*(f"t{end}._use_count()" for end in ends), *(f"num_holders(s{end}._cdata)" for end in ends)))
    lines.append(f"return Found([{tensors}], [{storages}], [{sizes}], [{holders}])")
    exec("".join(("def read(made):", *(f"\n    {line}" for line in lines))), namespace)
    return namespace["read"]


def _saved_in(node: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a node holds, by what is written after it to read each."""
    for name, value in saved_values(node):
        if isinstance(value, Tensor):
            yield f".{name}", value
        elif isinstance(value, (list, tuple)):
            items = enumerate(cast("Sequence[Any]", value))
            yield from ((f".{name}[{k}]", item) for k, item in items if isinstance(item, Tensor))
