"""Training of models that do not fit: rematerialization under a true byte budget."""

from typing import TYPE_CHECKING, Any

from .capture.tracer import trace as trace
from .errors import InfeasibleBudgetError as InfeasibleBudgetError
from .errors import ScheduleError as ScheduleError
from .errors import TraceError as TraceError
from .execution.rewriter import restore as restore
from .measure.meter import measure_peak as measure_peak
from .module_state.ambient import is_recomputing as is_recomputing
from .planners import PLANNERS as PLANNERS
from .plans.plan import Plan as Plan
from .plans.planner import plan as plan
from .profiling.profiler import profile as profile
from .regions.rematerializer import compile_stretches as compile_stretches
from .regions.rematerializer import rematerialize as rematerialize
from .schedules.graph import Graph as Graph
from .schedules.graph import Node as Node
from .schedules.schedule import Schedule as Schedule
from .schedules.simulator import Simulation as Simulation
from .schedules.simulator import simulate as simulate

if TYPE_CHECKING:
    from .batch_search.plain_trial import find_batch_size as find_batch_size
    from .trainer.callback import Rematerialization as Rematerialization

_LAZY = {"Rematerialization": ".trainer.callback", "find_batch_size": ".batch_search.plain_trial"}


def __getattr__(name: str) -> Any:
    """Imports Lightning only where it is used: it takes longer to import than all the rest."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name], __name__), name)
