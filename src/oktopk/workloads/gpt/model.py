"""The decoder of GPT-2: attention to what came before, then a perceptron, each on normalised input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

_SPREAD = 0.02  # standard deviation of fresh weights


@dataclass(frozen=True)
class Shape:
    """The size of a network."""

    hidden: int
    layers: int
    heads: int
    length: int  # tokens that it sees at once
    vocabulary: int
    dropout: float = 0.0
    bias: bool = False  # GPT-2 has biases; later decoders have none


class Decoder(nn.Module):
    """Logits of the next token at every position, from tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.length, shape.hidden)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden, bias=shape.bias)
        self._initialise(shape.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n, steps] to [n, steps, vocabulary]; the embedding is the last layer too."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.norm(x) @ self.tokens.weight.t()
        return logits

    def _initialise(self, layers: int) -> None:
        """As GPT-2: what adds to the residual stream is smaller, since 2 x layers of them add up."""
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                adds = name.endswith(("attention.output.weight", "perceptron.output.weight"))
                nn.init.normal_(parameter, std=_SPREAD / (2 * layers) ** 0.5 if adds else _SPREAD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


class Block(nn.Module):
    """One layer: both parts add to what they read."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.hidden, bias=shape.bias)
        self.attention = Attention(shape)
        self.perceptron_norm = nn.LayerNorm(shape.hidden, bias=shape.bias)
        self.perceptron = Perceptron(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        added: Tensor = x + self.perceptron(self.perceptron_norm(x))
        return added


class Attention(nn.Module):
    """Each position reads from itself and those before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._heads, self._dropout = shape.heads, shape.dropout
        self.inputs = nn.Linear(shape.hidden, 3 * shape.hidden, bias=shape.bias)  # queries, keys, values
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=shape.bias)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inputs(x).unflatten(-1, (3, self._heads, -1))  # [n, steps, 3, heads, hidden / heads]
        queries, keys, values = (part.transpose(1, 2) for part in parts.unbind(2))
        dropout = self._dropout if self.training else 0.0
        read = scaled_dot_product_attention(queries, keys, values, dropout_p=dropout, is_causal=True)
        written: Tensor = self.dropout(self.output(read.transpose(1, 2).flatten(-2)))
        return written


class Perceptron(nn.Module):
    """Each position by itself."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.inputs = nn.Linear(shape.hidden, 4 * shape.hidden, bias=shape.bias)
        self.output = nn.Linear(4 * shape.hidden, shape.hidden, bias=shape.bias)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        written: Tensor = self.dropout(self.output(gelu(self.inputs(x), approximate="tanh")))
        return written
