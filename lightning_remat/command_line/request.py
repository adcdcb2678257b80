"""What was asked: the arguments of the command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..budget import Budget, check_budget, parse_budget
from ..planners import PLANNERS
from .devices import SHEETS, Device, device_named
from .shapes import InputShape
from .training import OPTIMIZERS, PRECISIONS
from .usage_error import UsageError

STRATEGIES = ("single", "ddp", "fsdp2")

_EXAMPLES = """\
examples:
  lightning-remat plan torchvision.models:resnet50 --input 96x3x224x224 --memory 4GiB
  lightning-remat plan torchvision.models:resnet50 --input Bx3x224x224 --memory 80GB --optimizer adamw
  lightning-remat plan my_project.modules:LitModel --device H100 --precision bf16-mixed
  lightning-remat plan path/to/config.json --input Bx1024 --device A100 --save plan.json --report plan.html
  lightning-remat plan path/to/config.json --input 8x1024 --device A100 --strategy fsdp2 --world-size 8 \
      --gather-bandwidth 50GB
"""


@dataclass(frozen=True, slots=True)
class Request:
    """The question.

    Attributes:
        target: What makes the model.
        inputs: Its inputs; none where it brings its own.
        memory: The budget; None for what the device has, or for no budget.
        optimizer: Name of the optimizer; None for the model's own, or plain SGD.
        precision: As Lightning's Trainer has it.
        planner: Name of the planner.
        strategy: One of `STRATEGIES`.
        world_size: Devices that train side by side.
        gather_bandwidth: Bytes a second that a device receives in a gather, by which it is planned which units are
            gathered once; None leaves that as `fully_shard` has it.
        compare: Whether all planners are asked.
        save: Where the plan goes.
        report: Where the page goes.
        as_json: Whether the answer is for machines.
        device: Whose seconds and memory are meant; None for this machine's.
    """

    target: str
    inputs: tuple[InputShape, ...]
    memory: Budget | None
    optimizer: str | None
    precision: str
    planner: str
    strategy: str
    world_size: int
    gather_bandwidth: float | None
    compare: bool
    save: Path | None
    report: Path | None
    as_json: bool
    device: Device | None

    @property
    def asks_batch_size(self) -> bool:
        """Whether the batch size is what is asked for."""
        return any(shape.batch_size is None for shape in self.inputs)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (lightning-remat plan --help tells more)")


def parse_request(arguments: Sequence[str]) -> Request:
    """The question that the arguments ask.

    Raises:
        UsageError: They ask none.
        SystemExit: They ask for help, which is printed.
    """
    given = vars(_parser().parse_args(arguments))
    del given["debug"]  # of `command.main`, whatever else is wrong
    inputs = tuple(map(InputShape.parse, given["inputs"]))
    if len({shape.batch_size for shape in inputs}) > 1:
        raise UsageError("the inputs have different batch sizes: give each --input the same first size, or B")
    given |= {
        "inputs": inputs,
        "memory": _memory(given["memory"]),
        "gather_bandwidth": _bandwidth(given["gather_bandwidth"]),
        "save": _writable(given["save"], "--save"),
        "report": _writable(given["report"], "--report"),
        "device": None if given["device"] is None else device_named(given["device"]),
    }
    request = Request(**given)
    _check_together(request)
    return request


def _check_together(request: Request) -> None:
    memory = request.memory
    if request.world_size < 1:
        raise UsageError(f"--world-size is {request.world_size}, expected at least 1")
    if request.world_size > 1 and request.strategy == "single":
        raise UsageError(f"--world-size {request.world_size} needs --strategy ddp or fsdp2")
    if request.gather_bandwidth is not None and request.strategy != "fsdp2":
        raise UsageError(
            f"--gather-bandwidth needs --strategy fsdp2: with {request.strategy} no parameters are gathered"
        )
    if request.asks_batch_size and memory is None and request.device is None:
        raise UsageError("--input B… asks for a batch size that fits: say into what, with --memory 80GB or --device")
    if request.asks_batch_size and isinstance(memory, str) and memory.strip().endswith("%"):
        raise UsageError(f"--memory {memory} is of a plain step of one size, and B asks for the size: give bytes")


def _memory(text: str | None) -> Budget | None:
    if text is None:
        return None
    budget: Budget = int(text) if text.isdecimal() else text
    try:
        check_budget(budget)
    except ValueError:
        expected = "expected a size such as 8GiB or 80GB, bytes, or a part of the plain peak such as 50%"
        raise UsageError(f"--memory is {text!r}, {expected}") from None
    return budget


def _bandwidth(text: str | None) -> float | None:
    if text is None:
        return None
    amount = text.strip().removesuffix("/s")
    try:
        if "%" in amount:
            raise ValueError
        budget: Budget = int(amount) if amount.isdecimal() else amount
        return float(parse_budget(budget, plain_peak_bytes=0, device_bytes=0))
    except ValueError:
        raise UsageError(f"--gather-bandwidth is {text!r}, expected bytes a second, such as 50GB") from None


def _writable(path: Path | None, option: str) -> Path | None:
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"{option} is {path}, and there is no folder {path.absolute().parent}")
    return path


def _parser() -> argparse.ArgumentParser:
    options: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": _EXAMPLES}
    options["allow_abbrev"] = False  # an option is what it is called: `--debug` counts where parsing fails, too
    whole = _Parser(prog="lightning-remat", description="Trains models that do not fit. See: plan --help.")
    commands = whole.add_subparsers(required=True, metavar="plan")
    parser = commands.add_parser(
        "plan",
        help="whether a model fits, what that costs, and the batch size",
        description="Whether a model fits into memory, what that costs, and at which batch size. Nothing is allocated, "
        "nothing is trained, and no GPU is needed.",
        **options,
    )
    parser.add_argument(
        "target",
        help="package.module:callable that returns a torch.nn.Module (the working directory counts; arguments may "
        "follow, as in module:Net(width=64)), a LightningModule, a Hugging Face config class, or a config.json",
    )
    parser.add_argument(
        "--input",
        dest="inputs",
        action="append",
        default=[],
        metavar="SIZES",
        help="such as 96x3x224x224 or, where the batch size is asked for, Bx3x224x224; :int64 after it for tokens; "
        "once for each input; left out for a LightningModule with example_input_array",
    )
    parser.add_argument("--memory", help="the budget, such as 8GiB, 80GB or 50%% of the plain step's peak")
    parser.add_argument("--device", metavar="NAME", help=f"whose memory and seconds are meant: {', '.join(SHEETS)}")
    parser.add_argument(
        "--optimizer", choices=sorted(OPTIMIZERS), help="counted with its state (default: the model's own, or sgd)"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="32-true", help="as in Lightning's Trainer")
    parser.add_argument("--planner", choices=sorted(PLANNERS), default="auto", metavar="NAME", help="see --compare")
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="single",
        help="ddp adds its gradient buckets; fsdp2 calls fully_shard on every repeated block and on the whole",
    )
    parser.add_argument("--world-size", type=int, default=1, metavar="N", help="devices of --strategy")
    parser.add_argument(
        "--gather-bandwidth",
        metavar="BYTES",
        help="a second, that a device receives in a gather of --strategy fsdp2, such as 50GB: plans also which units "
        "are gathered once, and which again for their backward",
    )
    parser.add_argument("--compare", action="store_true", help="also asks every other planner (minutes)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="writes the plan, which rematerialize(plan=) takes")
    parser.add_argument("--report", type=Path, metavar="FILE", help="writes a page with pictures (.html)")
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="prints the answer as JSON, and nothing else"
    )
    parser.add_argument("--debug", action="store_true", help="shows where an error comes from")
    return whole
