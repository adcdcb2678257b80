"""Train a network under a memory budget, test it, and leave config, log, report and plots in a folder of the run.

python recipes/train.py                                  # a ResNet on real digits, a minute or two on a laptop
python recipes/train.py model=unet data=scenes remat=rotor remat.memory_budget=40%
python recipes/train.py experiment=batch_size_scaling
python recipes/train.py --help                           # all choices
"""

import logging
import warnings
from pathlib import Path

import hydra
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor
from omegaconf import DictConfig, OmegaConf

from remat_recipes.curves import plot_training

logger = logging.getLogger(__name__)


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(config: DictConfig) -> dict[str, float]:
    """The test metrics of the trained network."""
    # Data that lies in memory is loaded faster by the main process than by workers.
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    print(OmegaConf.to_yaml(config, resolve=True))
    seed_everything(config.seed, workers=True)

    module: LightningModule = instantiate(config.module, _convert_="all")
    data: LightningDataModule = instantiate(config.data, _convert_="all")
    callbacks = [LearningRateMonitor()]
    if config.remat.planner is not None:
        callbacks.append(instantiate(config.remat, _convert_="all"))
    trainer: Trainer = instantiate(
        config.trainer,
        callbacks=callbacks,
        logger=[instantiate(choice) for choice in config.logger.values()],
        default_root_dir=config.output_dir,
    )
    for log in trainer.loggers:
        log.log_hyperparams(OmegaConf.to_container(config, resolve=True))

    trainer.fit(module, datamodule=data, ckpt_path=config.ckpt_path)
    (metrics,) = trainer.test(module, datamodule=data)
    if trainer.is_global_zero:
        plot_training(Path(config.output_dir))
        for name, value in metrics.items():
            print(f"{name} {value:.4f}")
        print(f"everything about this run is in {config.output_dir}")
    return dict(metrics)


if __name__ == "__main__":
    main()
