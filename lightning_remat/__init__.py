"""Training of models that do not fit: rematerialization under a true byte budget."""

from typing import TYPE_CHECKING, Any

from .ambient import is_recomputing as is_recomputing
from .errors import InfeasibleBudgetError as InfeasibleBudgetError
from .errors import ScheduleError as ScheduleError
from .errors import TraceError as TraceError
from .graph import Graph as Graph
from .graph import Node as Node
from .meter import measure_peak as measure_peak
from .planner import Plan as Plan
from .planner import plan as plan
from .planners import PLANNERS as PLANNERS
from .profiler import profile as profile
from .rematerializer import rematerialize as rematerialize
from .rewriter import restore as restore
from .schedule import Schedule as Schedule
from .simulator import Simulation as Simulation
from .simulator import simulate as simulate
from .tracer import trace as trace

if TYPE_CHECKING:
    from .batch_search.plain_trial import find_batch_size as find_batch_size
    from .callback import Rematerialization as Rematerialization

_LAZY = {"Rematerialization": ".callback", "find_batch_size": ".batch_search.plain_trial"}


def __getattr__(name: str) -> Any:
    """Imports Lightning only where it is used: it takes longer to import than all the rest."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name], __name__), name)
