"""A Hugging Face model in a LightningModule, within 70 % of its memory; its own gradient checkpointing stays off.

python recipes/examples/hugging_face.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_remat import Rematerialization


class LanguageModel(LightningModule):
    """GPT-2, small here; `GPT2LMHeadModel.from_pretrained("gpt2")` is used alike."""

    def __init__(self, num_layers: int = 3, width: int = 64) -> None:
        super().__init__()
        # What generation keeps (use_cache) is of no use in training, and takes memory.
        config = GPT2Config(n_layer=num_layers, n_embd=width, n_head=4, vocab_size=256, n_positions=64, use_cache=False)
        self.network = GPT2LMHeadModel(config)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.network(input_ids=tokens, labels=tokens).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def main(max_steps: int = 3, folder: str = "outputs/examples") -> Rematerialization:
    """The callback after the run."""
    tokens = torch.randint(256, (32, 64), generator=torch.Generator().manual_seed(0))
    remat = Rematerialization(memory_budget="70%", batch_size="keep")
    trainer = Trainer(max_steps=max_steps, callbacks=[remat], default_root_dir=folder)
    trainer.fit(LanguageModel(), DataLoader(list(tokens), batch_size=8))
    return remat


if __name__ == "__main__":
    main()
