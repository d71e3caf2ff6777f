"""Arguments and words for people."""
