"""What is written for this run, and not installed: whose globals and classes a training step may change."""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType

_PACKAGE = Path(__file__).parent.parent

_INSTALLED = (*{Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}, _PACKAGE)
"""Where files lie that others have written."""

_FOLDERS = {"site-packages", "dist-packages"}
"""Names of such places, in whichever environment: the second is Debian's."""


def is_own_code(value: FunctionType | type) -> bool:
    """Whether a function or a class comes from a file that nobody has installed, or from no file: a notebook's cell.

    >>> import json
    >>> is_own_code(json.dumps), is_own_code(json.JSONEncoder), is_own_code(int), is_own_code(is_own_code)
    (False, False, False, False)
    >>> is_own_code(eval("lambda: 0"))
    True
    """
    if isinstance(value, FunctionType):
        return is_own_file(value.__code__.co_filename)
    module = sys.modules.get(value.__module__)
    if module is None:
        return False
    file = getattr(module, "__file__", None)
    return is_own_file(file) if file is not None else value.__module__ == "__main__"


@cache
def is_own_file(path: str) -> bool:
    """Whether it is one, or the name of a cell."""
    file = Path(path)
    is_installed = not _FOLDERS.isdisjoint(file.parts) or any(file.is_relative_to(place) for place in _INSTALLED)
    return not path.startswith("<frozen") and not is_installed


def global_names(code: CodeType) -> Iterator[str]:
    """The globals that a function and those within it read or write.

    >>> def count():
    ...     global calls
    ...     calls = max(map(lambda k: k + start, range(3)))
    >>> list(global_names(count.__code__))
    ['max', 'map', 'range', 'calls', 'start']
    """
    for instruction in dis.get_instructions(code):
        if instruction.opname.endswith("_GLOBAL"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from global_names(constant)
