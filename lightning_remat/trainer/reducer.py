"""What DDP counts of backwards: those of steps that are tried run beside it, and yet it is told of them."""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch import Trainer
from torch.nn.parallel import DistributedDataParallel


def forget_backwards(trainer: Trainer) -> None:
    """Has DDP begin anew, as when it was made, where the backwards that it was told of would mislead it.

    Where it looks for unused parameters, those that such a backward has reached count as used, and the next step fails
    if it does not use them. Of a static graph it counts to the end of the first step how many gradients each parameter
    gets, and waits for as many from then on. No gradient may be there to which the next step adds: DDP would take its
    parameter for unused.
    """
    model: Any = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return
    ddp: Any = cast(Any, model)  # of its state nothing is typed
    counts = not ddp._static_graph_delay_allreduce_enqueued if ddp.static_graph else ddp.find_unused_parameters
    if not counts:
        return
    hooks, ddp._comm_hooks = ddp._comm_hooks, []
    del ddp.reducer, ddp.logger  # with them go the buckets, of which there must not be two at once
    ddp.__setstate__({**vars(ddp)})  # as one that is unpickled
    for hook, state in hooks:
        ddp.register_comm_hook(state, hook)
