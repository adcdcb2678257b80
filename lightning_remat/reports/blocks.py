"""The modules that a person tells apart in a network, from the names of its operations."""

from __future__ import annotations

from collections.abc import Sequence


def blocks(names: Sequence[str], most: int = 40) -> tuple[list[str], list[int]]:
    """The modules at the greatest depth that gives at most `most` of them, and for each operation its module's place.

    >>> blocks(["stem", "layer1.0.conv", "layer1.0.relu", "layer1.1.conv"], most=3)
    (['stem', 'layer1.0', 'layer1.1'], [0, 1, 1, 2])
    """
    parts = [name.split(".") for name in names]
    cut = [""] * len(names)
    for depth in range(1, max(map(len, parts), default=0) + 1):
        # An operation directly in a block stays with the block: its own name is no module.
        deeper = [".".join(part[: max(1, min(depth, len(part) - 1))]) for part in parts]
        if depth > 1 and len(set(deeper)) > most:
            break
        cut = deeper
    order = list(dict.fromkeys(cut))
    return order, [order.index(name) for name in cut]
