"""Networks with auxiliary heads answer with a tuple while training: GoogLeNet, Inception v3, PSPNet."""

from torch import Tensor


def main_and_auxiliary(output: Tensor | tuple[Tensor | None, ...]) -> tuple[Tensor, list[Tensor]]:
    """The logits of the main head, and those of the auxiliary heads that are there."""
    if not isinstance(output, tuple):  # not `isinstance(output, Tensor)`: while torch.fx traces, it is a proxy
        return output, []
    main, *auxiliary = output
    assert main is not None
    return main, [logits for logits in auxiliary if logits is not None]
