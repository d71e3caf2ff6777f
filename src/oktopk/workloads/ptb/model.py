"""The word-level LSTM."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Hidden = tuple[Tensor, Tensor]  # each [layers, columns, hidden]


class WordLSTM(nn.Module):
    """Embedding, LSTM layers, decoder, with dropout between all of them."""

    def __init__(self, vocabulary: int, hidden: int, layers: int, dropout: float, tied: bool = False) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=dropout if layers > 1 else 0.0)
        self.decoder = nn.Linear(hidden, vocabulary)
        self._initialise(0.1 if hidden < 1500 else 0.04)
        if tied:
            self.decoder.weight = self.embedding.weight

    def forward(self, words: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        """Logits [steps, columns, vocabulary] and the state after the last step."""
        output, hidden = self.lstm(self.dropout(self.embedding(words)), hidden)
        return self.decoder(self.dropout(output)), hidden

    def _initialise(self, reach: float) -> None:
        """Uniform as in Zaremba et al. (2014): 0.04 for their large network."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -reach, reach)
        nn.init.zeros_(self.decoder.bias)


def zero_state(layers: int, columns: int, hidden: int) -> Hidden:
    return torch.zeros(layers, columns, hidden), torch.zeros(layers, columns, hidden)
