"""A training loop in plain PyTorch whose step stays within 60 % of its memory, with the same losses.

python recipes/examples/plain_pytorch.py
"""

import torch
from torch import nn

from lightning_remat import rematerialize, restore


def main(num_steps: int = 20, width: int = 128, samples: int = 2048) -> float:
    """The last loss."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Sigmoid()) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(width, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x = torch.randn(samples, width)
    y = x[:, :1].sin()

    plan = rematerialize(model, x, memory_budget="60%")  # or "8GiB"; the loop below is what it was before
    print(f"{plan.plain.peak_bytes / 2**20:.1f} MiB -> {plan.peak_bytes / 2**20:.1f} MiB")

    loss = torch.tensor(0.0)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"loss {loss.item():.4f}")
    restore(model)  # the plain forward is back; eval() and no_grad() use it anyway
    return loss.item()


if __name__ == "__main__":
    main()
