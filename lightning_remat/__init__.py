"""Training of models that do not fit: rematerialization under a true byte budget."""

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
from .rewriter import rematerialize as rematerialize
from .rewriter import restore as restore
from .schedule import Schedule as Schedule
from .simulator import Simulation as Simulation
from .simulator import simulate as simulate
from .tracer import trace as trace
