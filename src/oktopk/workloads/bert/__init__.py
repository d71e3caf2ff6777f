"""BERT pre-training: masked words and next sentences."""
