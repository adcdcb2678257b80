"""Fabric: `find_batch_size` plans, runs two steps to check, and leaves the module rewritten.

python recipes/examples/fabric.py
"""

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_remat import find_batch_size


def main(memory_budget: str = "4MiB", num_steps: int = 5) -> int:
    """The batch size found."""
    fabric = Fabric(accelerator="auto", devices=1)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(8)]
    network = nn.Sequential(*blocks, nn.Linear(64, 1))
    model, optimizer = fabric.setup(network, torch.optim.SGD(network.parameters(), lr=0.1))

    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()

    found = find_batch_size(
        network,
        torch.randn(64, 64, device=fabric.device),
        loss_of,
        optimizer,
        memory_budget=memory_budget,
        precision=fabric.autocast,
        backward=fabric.backward,
    )
    print(f"batch size {found.batch_size}: {found.choice}")
    for _ in range(num_steps):
        optimizer.zero_grad()
        fabric.backward(loss_of(torch.randn(found.batch_size, 64, device=fabric.device)))
        optimizer.step()
    return found.batch_size


if __name__ == "__main__":
    main()
