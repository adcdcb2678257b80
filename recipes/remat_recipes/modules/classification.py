"""Image classification: cross entropy, accuracy, any network of (batch, num_classes) logits."""

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy

from remat_recipes.modules.optimization import OptimizerFactory, SchedulerFactory, configure
from remat_recipes.modules.outputs import main_and_auxiliary


class Classification(LightningModule):
    """Logs `train/loss`, `val/loss`, `val/accuracy`, `test/loss`, `test/accuracy` (fraction of samples).

    Args:
        network: images -> logits, or a tuple of logits, the main ones first.
        num_classes: length of the logits.
        optimizer: parameters -> optimizer.
        scheduler: `(optimizer, total_steps=)` -> schedule, or none.
        auxiliary_weight: of the loss of each auxiliary head (0.3 in the GoogLeNet paper).
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        auxiliary_weight: float = 0.3,
    ) -> None:
        super().__init__()
        self.network = network
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.auxiliary_weight = auxiliary_weight
        self.accuracy = nn.ModuleDict(
            {stage: MulticlassAccuracy(num_classes, average="micro") for stage in ("val", "test")}
        )

    def forward(self, images: Tensor) -> Tensor:
        return main_and_auxiliary(self.network(images))[0]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        logits, auxiliary = main_and_auxiliary(self.network(images))
        loss = functional.cross_entropy(logits, targets)
        for other in auxiliary:
            loss = loss + self.auxiliary_weight * functional.cross_entropy(other, targets)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        images, targets = batch
        logits = self(images)
        self.accuracy[stage](logits, targets)
        self.log(f"{stage}/loss", functional.cross_entropy(logits, targets), batch_size=len(images))
        self.log(f"{stage}/accuracy", self.accuracy[stage], prog_bar=True, batch_size=len(images))

    def configure_optimizers(self) -> Any:
        return configure(self, self.optimizer, self.scheduler)
