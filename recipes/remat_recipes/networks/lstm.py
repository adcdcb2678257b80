"""Stacked LSTM, unrolled by a loop: the long sequences of chen2016 (arXiv:1604.06174), section 5.3."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional


class ElementaryLSTMCell(nn.LSTMCell):
    """`torch.nn.LSTMCell`, parameters and all, in elementary operations: the fine-grained graph of the paper."""

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, cell = hx
        gates = functional.linear(input, self.weight_ih, self.bias_ih)
        gates = gates + functional.linear(hidden, self.weight_hh, self.bias_hh)
        keep, forget, change, emit = gates.chunk(4, dim=1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(keep) * torch.tanh(change)
        return torch.sigmoid(emit) * torch.tanh(cell), cell


class LSTM(nn.Module):
    """Logits of shape (batch, num_steps, vocabulary_size) for tokens of shape (batch, num_steps).

    The paper's network, by default: four layers of 1024 hidden units over 64 steps, fed with a 50-dimensional vector
    a step and answering with one of 5000 classes each.

    Args:
        vocabulary_size: number of tokens, and of classes.
        embedding_size: length of the vector that stands for a token.
        hidden_size: of each layer.
        num_layers: layers of cells.
        num_steps: length of the sequences.
        cell: `"fused"` is `torch.nn.LSTMCell`, one operation; `"elementary"` is the same in a dozen operations.
    """

    def __init__(
        self,
        vocabulary_size: int = 5000,
        embedding_size: int = 50,
        hidden_size: int = 1024,
        num_layers: int = 4,
        num_steps: int = 64,
        cell: Literal["fused", "elementary"] = "fused",
    ) -> None:
        super().__init__()
        if cell not in ("fused", "elementary"):
            raise ValueError(f"cell must be 'fused' or 'elementary', not {cell!r}")
        make = nn.LSTMCell if cell == "fused" else ElementaryLSTMCell
        self.hidden_size = hidden_size
        self.num_steps = num_steps
        self.embedding = nn.Embedding(vocabulary_size, embedding_size)
        self.cells = nn.ModuleList(
            make(embedding_size if layer == 0 else hidden_size, hidden_size) for layer in range(num_layers)
        )
        self.head = nn.Linear(hidden_size, vocabulary_size)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs = self.embedding(tokens)
        zeros = inputs.new_zeros((inputs.shape[0], self.hidden_size))
        states = [(zeros, zeros)] * len(self.cells)
        outputs: list[Tensor] = []
        for step in range(self.num_steps):
            value = inputs[:, step]
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(value, states[layer])
                value = states[layer][0]
            outputs.append(value)
        return self.head(torch.stack(outputs, dim=1))
