"""Real text, when OKTOPK_DATA points to it: WikiText-2 and BERT's vocabulary give their published sizes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
DATA = Path(os.environ.get("OKTOPK_DATA", "/nonexistent"))


@pytest.fixture(autouse=True)
def real_data(tmp_path, monkeypatch):
    if not (DATA / "wikitext2").is_dir():
        pytest.skip("OKTOPK_DATA does not point to wikitext2 and bert")
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path))


def test_wikitext_2_has_its_published_size():
    from oktopk.workloads.ptb.workload import PtbConfig, PtbWorkload

    workload = PtbWorkload(PtbConfig(preset="wikitext2", data=str(DATA / "wikitext2")), 0)
    assert len(workload.words.train) == 2_088_628
    assert len(workload.words.vocabulary) == 33_278


def test_wikitext_2_makes_pairs_with_berts_own_vocabulary():
    from oktopk.workloads.bert.data import Corpus, load_corpus, make_batch

    folder, pieces = load_corpus(str(DATA / "wikitext2"), str(DATA / "bert" / "vocab.txt"), 30_522)
    assert len(pieces) == 30_522
    corpus = Corpus(folder, "train", 128)
    assert corpus.counts["documents"] > 550 and corpus.counts["sentences"] > 60_000
    batch = make_batch(corpus, np.arange(8), np.random.default_rng(0), pieces, 128)
    assert (batch.pieces == pieces.unknown).float().mean() < 0.1
    assert (batch.present.sum(1) > 100).float().mean() > 0.5
