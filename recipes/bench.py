"""The experiments of the papers side by side with ours: CSV, Markdown and plots into `recipes/results/PAPER`.

python recipes/bench.py paper=kusumoto2019
python recipes/bench.py paper=chen2016 output_dir=/tmp/chen
"""

from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from benchmarks import peers
from remat_recipes.papers import beaumont2024, chen2016, feng2018, kusumoto2019

PAPERS: dict[str, Callable[..., None]] = {
    "beaumont2024": beaumont2024.main,
    "chen2016": chen2016.main,
    "feng2018": feng2018.main,
    "kusumoto2019": kusumoto2019.main,
    "peers": peers.run,
}


@hydra.main(version_base="1.3", config_path="../conf", config_name="bench")
def main(config: DictConfig) -> None:
    """Runs the experiments of one paper."""
    print(OmegaConf.to_yaml(config, resolve=True))
    PAPERS[config.name](Path(config.output_dir), **OmegaConf.to_container(config.options, resolve=True))


if __name__ == "__main__":
    main()
