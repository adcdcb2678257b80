"""Whether the operators of PyTorch's own tests train as without us, where all around them, and they, run again.

python recipes/benchmarks/operators.py [softmax linalg …] [--samples 3]

Of each differentiable operator of `op_db` (its module needs `pip install expecttest`), with some of the inputs that are
listed there, as a function and in place: the operator stands between other operations, and takes three steps plainly
and three by a schedule that keeps nothing, or what chance chooses. Outputs, gradients and random state are compared bit
by bit. Writes recipes/results/operators.md: what was refused, with the reason, and what was not the same.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db  # pyright: ignore[reportMissingTypeStubs]
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_remat import Plan, TraceError, profile, simulate, trace
from lightning_remat.execution.assembly import compile_schedule
from lightning_remat.execution.rewriter import forced
from lightning_remat.lowering import keep_everything, lower_kept
from lightning_remat.regions.self_check import fingerprint

RESULTS = Path(__file__).parent.parent / "results" / "operators.md"
NUM_STEPS = 3
MOST_LISTED = 60
"""Of one operator's inputs as many are made, some of which are chosen."""

SAME, REFUSED, PLAIN = "the same", "refused", "nothing to compare"


class Case(NamedTuple):
    """An operator with inputs.

    Attributes:
        name: That of the operator, and whether it writes in place.
        function: What is called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Between(nn.Module):
    """An operator that reads what others have made, and whose results others read."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.function = case.function
        num_read = sum(map(_is_dense, tree_leaves((case.args, case.kwargs))))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(num_read))

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        leaves, form = tree_flatten((args, kwargs))
        scales = iter(self.scales)
        args, kwargs = tree_unflatten([leaf * next(scales) if _is_dense(leaf) else leaf for leaf in leaves], form)
        made = [t for t in tree_leaves(self.function(*args, **kwargs)) if _is_dense(t)]
        return [(torch.view_as_real(t) if t.is_complex() else t).sin() for t in made]


def _is_dense(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return value.is_floating_point() or value.is_complex()


def cases(words: list[str], num_samples: int, chance: random.Random) -> Iterator[Case]:
    """Those of the operators whose names contain one of the words, or of all."""
    for operator in cast("list[Any]", op_db):
        name = ".".join(filter(None, (operator.name, operator.variant_test_name)))
        wanted = not words or any(word in name for word in words)
        if not (wanted and operator.supports_autograd and torch.float32 in operator.dtypes):
            continue
        listed = operator.sample_inputs("cpu", torch.float32, requires_grad=False)
        samples = [sample for sample, _ in zip(listed, range(MOST_LISTED), strict=False)]
        chosen = samples[:1] + chance.sample(samples[1:], min(num_samples, len(samples)) - 1) if samples else []
        ways = {name: _itself(operator), f"{name}, in place": _in_place(operator)}
        for called, function in ways.items():
            if function is not None:
                for sample in chosen:
                    yield Case(called, function, (sample.input, *sample.args), dict(sample.kwargs))


def _itself(operator: Any) -> Callable[..., Any]:
    """What the list calls, without the wrapper that seeds the generator before, which no forward does."""
    found: Any = torch
    for part in operator.name.split("."):
        found = getattr(found, part, None)
    return found if callable(found) and _is_wrapper(operator.op) else operator.op


def _in_place(operator: Any) -> Callable[..., Any] | None:
    """The same in place, if it can be."""
    method: Any = operator.inplace_variant
    return partial(_itself(operator), inplace=True) if _is_wrapper(method) else method


def _is_wrapper(function: Any) -> bool:
    return getattr(function, "__name__", "") == "<lambda>"


def steps(module: nn.Module, case: Case) -> list[bytes | None]:
    """Fingerprints of all that some steps leave behind."""
    torch.manual_seed(0)
    found: list[bytes | None] = []
    for _ in range(NUM_STEPS):
        module.zero_grad()
        outputs = module(case.args, case.kwargs)
        if asking := [t.sum() for t in outputs if t.requires_grad]:
            torch.stack(asking).sum().backward()
        left = [*outputs, *(p.grad for p in module.parameters()), torch.get_rng_state()]
        found += [None if t is None else fingerprint(t) for t in left]
    return found


def verdict(case: Case, chance: random.Random) -> tuple[str, str]:
    """What became of a case, and why."""
    plain = Between(case)
    try:
        expected = steps(plain, case)
        is_repeated = expected == steps(plain, case)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:  # an input that is listed as an error
        return PLAIN, f"{type(error).__name__} without us, too"
    if not is_repeated:
        return PLAIN, "it does not do the same twice"
    ours = copy.deepcopy(plain)
    try:
        traced = trace(ours, case.args, case.kwargs)
    except TraceError as error:
        reason = str(error).removeprefix("Between.forward cannot be captured as one graph: ")
        return REFUSED, re.split(r" \(/|: call_|: got ", reason)[0]  # without places and addresses
    graph = profile(traced, case.args, case.kwargs, repeats=1)
    kept = [n for n in range(len(graph.nodes)) if chance.random() < 0.5] if chance.random() < 0.5 else []
    schedule = lower_kept(graph, kept)
    simulation = simulate(graph, schedule)
    whole = simulate(graph, keep_everything(graph))
    forced(
        ours,
        compile_schedule(traced, schedule, graph),
        Plan("chance", simulation.peak_bytes, schedule, simulation, graph, whole),
    )
    return (SAME, "") if expected == steps(ours, case) else ("other bits", f"{kept} were kept")


def report(found: Counter[tuple[str, str, str]], command: str) -> str:
    """The table: names, what became of them, why, of how many inputs."""
    what = Counter[str]()
    for (_, became, _), count in found.items():
        what[became] += count
    inputs = ", ".join(f"{count} {became}" for became, count in what.items())
    names = {name for name, became, _ in found if became != PLAIN}
    same = names - {name for name, became, _ in found if became not in (SAME, PLAIN)}
    lines = [
        f"`{command}`, torch {torch.__version__.partition('+')[0]}\n",
        f"Of {len(names)} differentiable operators (in place counted apart), {len(same)} train exactly as without us "
        f"with all inputs that were tried. Inputs: {inputs}.\n",
        "| operator | what | why | inputs |\n|---|---|---|---|",
    ]
    rest = sorted((key, count) for key, count in found.items() if key[1] not in (SAME, PLAIN))
    lines += [f"| {name} | {became} | {why.replace('|', '/')} | {count} |" for (name, became, why), count in rest]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of names")
    parser.add_argument("--samples", type=int, default=3, help="inputs of each operator")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = Counter[tuple[str, str, str]]()
    for case in cases(arguments.words, arguments.samples, random.Random(0)):
        became, why = verdict(case, random.Random(case.name))
        found[case.name, became, why] += 1
        if became not in (SAME, PLAIN):
            print(case.name, became, why, flush=True)
    text = report(found, " ".join(["python recipes/benchmarks/operators.py", *sys.argv[1:]]))
    if not arguments.words:
        RESULTS.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
