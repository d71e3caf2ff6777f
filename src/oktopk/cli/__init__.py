"""Arguments and words for people: the only rows of the library that print."""

from oktopk.cli.main import main

__all__ = ["main"]
