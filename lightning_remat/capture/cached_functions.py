"""What the user has cached (`functools.lru_cache`) is called as it is: TorchDynamo looks through the cache.

Noise that is drawn once and kept would be drawn at each call; a list that is kept, made anew. What libraries cache are
shapes and patterns, which are the same each time: that is captured, as it costs no division.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from ..module_state.own_code import is_own_code
from .wrapped_calls import called_as_they_are, wrapper_of


def _cached(variable: Any) -> FunctionType | None:
    """The function that the user has written and cached, if it is one."""
    wrapper = wrapper_of(variable).wrapper_obj
    inside = getattr(wrapper, "__wrapped__", None)
    is_one = hasattr(wrapper, "cache_info") and isinstance(inside, FunctionType) and is_own_code(inside)
    return inside if is_one else None


CHANGES = called_as_they_are(_cached, "a function is called whose results are kept:")
