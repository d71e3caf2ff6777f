"""Word and character errors of a set of texts, as sums that add up over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oktopk.errors import UnsupportedError


def error_sums(references: Sequence[str], hypotheses: Sequence[str]) -> dict[str, float]:
    """Edits and lengths by jiwer: `word_errors`, `words`, `character_errors`, `characters`."""
    if not references:
        return {"word_errors": 0.0, "words": 0.0, "character_errors": 0.0, "characters": 0.0}
    jiwer = _jiwer()
    words = jiwer.process_words(list(references), list(hypotheses))
    characters = jiwer.process_characters(list(references), list(hypotheses))
    return {
        "word_errors": float(_edits(words)),
        "words": float(_length(words)),
        "character_errors": float(_edits(characters)),
        "characters": float(_length(characters)),
    }


def error_rates(totals: Mapping[str, float]) -> dict[str, float]:
    """WER and CER of summed totals: edits over reference length; 0 is perfect, above 1 is possible."""
    rates = {}
    if totals.get("words"):
        rates["WER"] = totals["word_errors"] / totals["words"]
    if totals.get("characters"):
        rates["CER"] = totals["character_errors"] / totals["characters"]
    return rates


def _edits(output: Any) -> int:
    return int(output.substitutions + output.deletions + output.insertions)


def _length(output: Any) -> int:
    return int(output.hits + output.substitutions + output.deletions)


def _jiwer() -> Any:
    try:
        import jiwer
    except ImportError as error:
        raise UnsupportedError("word error rates need jiwer: pip install 'oktopk[speech]'.") from error
    return jiwer
