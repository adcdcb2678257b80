"""Language modelling: cross entropy of the next token, perplexity, accuracy."""

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

from remat_recipes.modules.optimization import OptimizerFactory, SchedulerFactory, configure


class Language(LightningModule):
    """Logs `train/loss`, and `loss`, `perplexity` and `accuracy` (fraction of the tokens) under `val/` and `test/`.

    Args:
        network: tokens (batch, length) -> logits (batch, length, num_classes).
        num_classes: size of the vocabulary.
        optimizer: parameters -> optimizer.
        scheduler: `(optimizer, total_steps=)` -> schedule, or none.
    """

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.optimizer = optimizer
        self.scheduler = scheduler
        stages = ("val", "test")
        self.accuracy = nn.ModuleDict({stage: MulticlassAccuracy(num_classes, average="micro") for stage in stages})
        self.perplexity = nn.ModuleDict({stage: Perplexity() for stage in stages})

    def forward(self, tokens: Tensor) -> Tensor:
        return self.network(tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, following = batch
        loss = next_token_loss(self.network(tokens), following)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        tokens, following = batch
        logits = self(tokens)
        self.accuracy[stage](logits.flatten(0, 1), following.flatten())
        self.perplexity[stage](logits, following)
        self.log(f"{stage}/loss", next_token_loss(logits, following), batch_size=len(tokens))
        self.log(f"{stage}/accuracy", self.accuracy[stage], prog_bar=True, batch_size=len(tokens))
        self.log(f"{stage}/perplexity", self.perplexity[stage], prog_bar=True, batch_size=len(tokens))

    def configure_optimizers(self) -> Any:
        return configure(self, self.optimizer, self.scheduler)


def next_token_loss(logits: Tensor, following: Tensor) -> Tensor:
    """Cross entropy, mean over all tokens of the batch."""
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())
