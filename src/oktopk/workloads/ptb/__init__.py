"""Word-level language model (LSTM) on PTB, WikiText-2 or the embedded docstrings."""
