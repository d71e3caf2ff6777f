"""BERT with both pre-training heads, on the models of `transformers`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import BertConfig as HfConfig
from transformers import BertForPreTraining


@dataclass(frozen=True)
class Shape:
    """The size of a network."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int
    positions: int = 512
    dropout: float = 0.1


class Bert(nn.Module):
    """Logits of the hidden pieces and of "unrelated", from shown pieces."""

    def __init__(self, shape: Shape, tied: bool = True) -> None:
        super().__init__()
        self.network = BertForPreTraining(_hf_config(shape, tied))
        head = self.network.cls.predictions
        # Untied, transformers keeps two biases for one decoder; only one is ever used.
        head.decoder.bias = head.bias

    def forward(self, pieces: Tensor, segments: Tensor, present: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Piece logits [wanted positions, vocabulary], so that no decoder work is spent on the others; and [n, 2]."""
        encoded = self.network.bert(input_ids=pieces, token_type_ids=segments, attention_mask=present.long())
        words = self.network.cls.predictions(encoded.last_hidden_state[wanted])
        return words, self.network.cls.seq_relationship(encoded.pooler_output)


def _hf_config(shape: Shape, tied: bool) -> HfConfig:
    return HfConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.hidden,
        max_position_embeddings=shape.positions,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.dropout,
        tie_word_embeddings=tied,
    )
