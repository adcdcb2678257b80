"""What every planner makes of a network: a table, trade-off curves, memory timelines; on fake tensors, no training.

python recipes/plan.py model=densenet161 batch_size=32 budget=2GiB
python recipes/plan.py -m model=resnet50,unet remat=rotor,chen,auto
"""

from pathlib import Path

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lightning_remat import PLANNERS, Graph, profile, trace
from lightning_remat.budget import format_bytes, parse_budget
from lightning_remat.plans.explanation import explain
from remat_recipes.comparison import Attempt, attempt, attempts_table, budgets_between, trade_off, write_csv
from remat_recipes.plan_plots import plot_timelines, plot_trade_off
from schedule_picture import plot_schedule


@hydra.main(version_base="1.3", config_path="../conf", config_name="plan")
def main(config: DictConfig) -> None:
    """Prints the table; writes curves, plots and plans into the run's folder."""
    print(OmegaConf.to_yaml(config, resolve=True))
    console = Console(width=max(100, Console().width))
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    graph = profiled(config)
    (folder / "graph.json").write_text(graph.to_json())

    plain = attempt(graph, "keep_all", None)
    assert plain.plan is not None
    peak_bytes = plain.plan.peak_bytes
    budget_bytes = parse_budget(config.budget, plain_peak_bytes=peak_bytes, device_bytes=0)
    planners = [config.remat.planner] if config.remat.planner else [name for name in PLANNERS if name != "keep_all"]

    first = [attempt(graph, name, budget_bytes) for name in planners]
    network = str(config.model._target_).rpartition(".")[2]
    title = f"{network}, batch {config.batch_size}, {'x'.join(map(str, config.input_shape))}"
    facts = f"{len(graph.nodes)} operations, plain peak {format_bytes(peak_bytes)}, budget {format_bytes(budget_bytes)}"
    console.print(attempts_table([plain, *first], f"{title}: {facts}"))
    for found in first:
        if found.plan is not None and found.planner == "auto":
            console.print(explain(found.plan).text, markup=False, soft_wrap=True)
        if found.plan is not None:
            (folder / f"plan_{found.planner}.json").write_text(found.plan.to_json())

    floors = [attempt(graph, name, 0).floor_bytes for name in planners]
    lowest_bytes = min(floor for floor in floors if floor is not None)
    budgets = budgets_between(lowest_bytes, peak_bytes, config.num_budgets)
    curves: dict[str, list[Attempt]] = {name: trade_off(graph, name, budgets, console) for name in planners}
    write_csv([plain, *first, *(point for curve in curves.values() for point in curve)], folder / "trade_off.csv")
    plot_trade_off(curves, plain, budget_bytes, folder / "trade_off.png", title)
    plot_timelines([plain, *first], budget_bytes, folder / "timeline.png", title)
    if fitting := [found.plan for found in first if found.plan is not None]:
        plot_schedule(min(fitting, key=lambda best: best.simulation.seconds), folder / "schedule.png", title)
    console.print(f"curves, timelines and plans are in {folder}")


def profiled(config: DictConfig) -> Graph:
    """The network of the config as a graph, at its batch size; nothing is allocated."""
    with FakeTensorMode():
        network = instantiate(config.model, _convert_="all")
        batch = example(config.batch_size, tuple(config.input_shape), config.num_classes)
        return profile(trace(network, batch), batch)


def example(batch_size: int, input_shape: tuple[int, ...], num_classes: int) -> Tensor:
    """A batch of random images, or of tokens where the shape is one number."""
    if len(input_shape) == 1:
        return torch.randint(num_classes, (batch_size, *input_shape))
    return torch.randn(batch_size, *input_shape)


if __name__ == "__main__":
    main()
