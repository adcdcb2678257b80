"""Semantic segmentation: cross entropy over the pixels, mean intersection over union."""

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassJaccardIndex

from remat_recipes.modules.optimization import OptimizerFactory, SchedulerFactory, configure
from remat_recipes.modules.outputs import main_and_auxiliary

IGNORED = 255  # the label of pixels that have none (VOC)


class Segmentation(LightningModule):
    """Logs `train/loss`, `val/loss`, `val/miou`, `test/loss`, `test/miou` (mean over the classes, in [0, 1]).

    Args:
        network: images -> logits (batch, num_classes, height, width), or a tuple of them, the main ones first. Logits
            smaller than the labels (a U-Net without padding) are judged on the middle of the labels.
        num_classes: classes of a pixel.
        optimizer: parameters -> optimizer.
        scheduler: `(optimizer, total_steps=)` -> schedule, or none.
        auxiliary_weight: of the loss of each auxiliary head (0.4 in the PSPNet paper).
        loss_inside: the module called with the batch computes the loss too, so that what the loss keeps for each
            pixel (the logarithm of all class probabilities) can be recomputed as well.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        auxiliary_weight: float = 0.4,
        loss_inside: bool = False,
    ) -> None:
        super().__init__()
        self.network = NetworkAndLoss(network, auxiliary_weight) if loss_inside else network
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.auxiliary_weight = auxiliary_weight
        self.iou = nn.ModuleDict(
            {stage: MulticlassJaccardIndex(num_classes, ignore_index=IGNORED) for stage in ("val", "test")}
        )

    def forward(self, images: Tensor) -> Tensor:
        inside = isinstance(self.network, NetworkAndLoss)
        return main_and_auxiliary((self.network.network if inside else self.network)(images))[0]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        if isinstance(self.network, NetworkAndLoss):
            loss = self.network(images, labels)
        else:
            loss = pixel_loss(self.network(images), labels, self.auxiliary_weight)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self(images)
        self.iou[stage](logits, middle(labels, logits))
        self.log(f"{stage}/loss", pixel_loss(logits, labels, self.auxiliary_weight), batch_size=len(images))
        self.log(f"{stage}/miou", self.iou[stage], prog_bar=True, batch_size=len(images))

    def configure_optimizers(self) -> Any:
        return configure(self, self.optimizer, self.scheduler)


class NetworkAndLoss(nn.Module):
    """(images, labels) -> loss: one region that holds the network and what its loss keeps."""

    def __init__(self, network: nn.Module, auxiliary_weight: float) -> None:
        super().__init__()
        self.network = network
        self.auxiliary_weight = auxiliary_weight

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return pixel_loss(self.network(images), labels, self.auxiliary_weight)


def pixel_loss(output: Tensor | tuple[Tensor | None, ...], labels: Tensor, auxiliary_weight: float) -> Tensor:
    """Cross entropy, mean over the labelled pixels; auxiliary heads add theirs with their weight."""
    logits, auxiliary = main_and_auxiliary(output)
    labels = middle(labels, logits)
    loss = functional.cross_entropy(logits, labels, ignore_index=IGNORED)
    for other in auxiliary:
        loss = loss + auxiliary_weight * functional.cross_entropy(other, labels, ignore_index=IGNORED)
    return loss


def middle(labels: Tensor, logits: Tensor) -> Tensor:
    """The middle of `labels`, a view as high and wide as `logits`."""
    height, width = logits.shape[2], logits.shape[3]
    top, left = (labels.shape[1] - height) // 2, (labels.shape[2] - width) // 2
    return labels[:, top : top + height, left : left + width]
