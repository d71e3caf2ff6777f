"""A small decoder (GPT) on characters or byte pairs of any text."""
