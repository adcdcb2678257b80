"""Transformer decoder of the size and shape of GPT-2 (A. Radford et al. 2019): pre-norm blocks, causal attention."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class GPT(nn.Module):
    """Logits of shape (batch, length, vocabulary_size) for tokens of shape (batch, length), length <= `num_positions`.

    Args:
        vocabulary_size: number of tokens.
        width: length of the vector at each position.
        num_blocks: blocks of attention and feed-forward layers.
        num_heads: heads of each attention; must divide `width`.
        num_positions: longest sequence.
        dropout: probability, on the embedding, the attention and both branches of a block.
        tied: the head's weight is the embedding's, as published.
    """

    def __init__(
        self,
        vocabulary_size: int = 50257,
        width: int = 768,
        num_blocks: int = 12,
        num_heads: int = 12,
        num_positions: int = 1024,
        dropout: float = 0.1,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        self.position = nn.Parameter(torch.empty(num_positions, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(width, num_heads, dropout) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        values = self.embedding(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(self.dropout(values))))


class _Block(nn.Module):
    """`x + attention(norm(x))`, then `x + feed_forward(norm(x))`."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width {width} is not divisible by num_heads {num_heads}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attended = nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout))
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, values: Tensor) -> Tensor:
        values = values + self._attend(self.norm1(values))
        return values + self.feed_forward(self.norm2(values))

    def _attend(self, values: Tensor) -> Tensor:
        query, key, value = self.query_key_value(values).chunk(3, dim=-1)
        query, key, value = self._split(query), self._split(key), self._split(value)
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.attended(mixed.transpose(1, 2).flatten(-2))

    def _split(self, values: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, heads, length, width of a head), a view."""
        return values.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
