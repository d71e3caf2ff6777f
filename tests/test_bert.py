"""The bert workload: pieces, pairs, masks, both heads."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from oktopk.errors import ConfigError, DataError
from oktopk.workloads import workload_classes

pytest.importorskip("transformers")
from oktopk.workloads.bert.data import IGNORED, Corpus, load_corpus, make_batch
from oktopk.workloads.bert.model import Bert
from oktopk.workloads.bert.tokenizer import SPECIAL, Pieces, read_vocabulary, train_vocabulary
from oktopk.workloads.bert.workload import PRESETS, BertConfig, BertWorkload
from workload_checks import losses_of

torch.set_num_threads(1)  # tests run side by side: more threads than cores only wait for each other
LENGTH = 32


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "cache"))


def sentence(document: int, number: int) -> str:
    """Every word says where it stands."""
    return " ".join(f"d{document} s{number} w{place}" for place in range(2 + (document + number) % 4))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    parts = ["\n".join(sentence(document, number) for number in range(2 + document % 7)) for document in range(40)]
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def corpus(text):
    folder, pieces = load_corpus(str(text), None, 400)
    return Corpus(folder, "train", LENGTH), pieces


@pytest.mark.parametrize(
    ("preset", "tied", "expected"),
    [("base", True, 110_106_428), ("base", False, 133_547_324), ("large", True, 336_226_108)],
)
def test_the_published_sizes_have_their_numbers_of_parameters(preset, tied, expected):
    with torch.device("meta"):
        model = Bert(PRESETS[preset].shape, tied)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize(("preset", "expected"), [("small", 583_226), ("tiny", 271_570)])
def test_the_small_sizes_have_their_numbers_of_parameters(preset, expected):
    model = Bert(PRESETS[preset].shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_a_given_vocabulary_keeps_its_numbers(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "##s", "the"]) + "\n")
    pieces = read_vocabulary(path)
    assert pieces.encode(["The cats", "dog"]) == [[8, 6, 7], [2]]
    assert (pieces.pad, pieces.unknown, pieces.mask) == (0, 2, 5) and pieces.ordinary == [6, 7, 8]


def test_a_vocabulary_without_mask_is_refused(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\ncat\n")
    with pytest.raises(DataError, match=r"vocab.txt \(5 pieces\) has no \[MASK\]: use a vocabulary made for BERT"):
        read_vocabulary(path)
    with pytest.raises(DataError, match=r"absent.txt is no file"):
        read_vocabulary(tmp_path / "absent.txt")


def test_a_trained_vocabulary_is_the_same_every_time_and_covers_its_text():
    lines = [sentence(document, number) for document in range(10) for number in range(5)]
    first, second = train_vocabulary(lambda: lines, 120), train_vocabulary(lambda: lines, 120)
    assert first.vocabulary == second.vocabulary and first.vocabulary[:5] == SPECIAL
    assert len(first) <= 120
    assert first.decode(first.encode([lines[7]])[0]) == lines[7]


def test_pairs_follow_each_other_or_come_from_another_document(corpus):
    passages, pieces = corpus
    rng = np.random.default_rng(0)
    unrelated = 0
    for number in [*range(len(passages))] * 10:
        a, b, other = passages.pair(number, rng)
        assert len(a) > 0 and len(b) > 0 and len(a) + len(b) + 3 <= LENGTH
        first, second = (pieces.decode(part.tolist()).split() for part in (a, b))
        same_document = first[0] == second[0] if second[0].startswith("d") else None
        assert same_document is None or same_document != other
        if not other and len(first) % 3 == 0 and second[0].startswith("d"):
            assert int(second[1][1:]) >= int(first[1][1:])  # it comes later in the text
        unrelated += other
    assert 0.4 < unrelated / (10 * len(passages)) < 0.6


def test_masks_hide_15_percent_as_80_10_10(corpus):
    passages, pieces = corpus
    numbers = np.arange(len(passages))
    hidden = masked = kept = changed = present = 0
    for seed in range(30):
        batch = make_batch(passages, numbers, np.random.default_rng(seed), pieces, LENGTH)
        where = batch.labels != IGNORED
        assert (where.sum(1) >= 1).all()
        assert not (where & ((batch.labels == pieces.cls) | (batch.labels == pieces.sep))).any()
        assert not (where & ~batch.present).any()
        shown = batch.pieces[where]
        hidden += int(where.sum())
        masked += int((shown == pieces.mask).sum())
        kept += int((shown == batch.labels[where]).sum())
        changed += int(((shown != pieces.mask) & (shown != batch.labels[where])).sum())
        present += int(batch.present.sum()) - 3 * len(numbers)
        assert set(shown.unique().tolist()) <= {pieces.mask, *pieces.ordinary}
    # Binomial with about 7,000 draws: 3 standard deviations are 0.015; rounding per pair moves the 15% a little.
    assert 0.13 < hidden / present < 0.18
    assert 0.78 < masked / hidden < 0.82 and 0.085 < changed / hidden < 0.115 and 0.085 < kept / hidden < 0.12


def test_segments_padding_and_special_pieces_are_in_place(corpus):
    passages, pieces = corpus
    batch = make_batch(passages, np.arange(6), np.random.default_rng(0), pieces, LENGTH)
    for row in range(6):
        end = int(batch.present[row].sum())
        original = torch.where(batch.labels[row] == IGNORED, batch.pieces[row], batch.labels[row])
        separators = (original == pieces.sep).nonzero().flatten().tolist()
        assert original[0] == pieces.cls and len(separators) == 2 and separators[1] == end - 1
        assert batch.segments[row].tolist() == [0] * (separators[0] + 1) + [1] * (end - separators[0] - 1) + [0] * (
            LENGTH - end
        )
        assert (original[end:] == pieces.pad).all()


def tiny(text, **options) -> BertWorkload:
    return BertWorkload(BertConfig(preset="tiny", data=str(text), batch_size=4, length=LENGTH, **options), seed=0)


def test_batches_do_not_depend_on_when_they_are_asked_for(text):
    whole = list(tiny(text).batches(1, 1, 2))
    resumed = list(tiny(text).batches(1, 1, 2, start=2))
    assert len(whole) == tiny(text).steps_per_epoch(2) and len(resumed) == len(whole) - 2
    for batch, same in zip(whole[2:], resumed, strict=True):
        assert torch.equal(batch.pieces, same.pieces) and torch.equal(batch.labels, same.labels)
    assert not torch.equal(whole[0].pieces, next(tiny(text).batches(0, 1, 2)).pieces)
    assert not torch.equal(whole[0].pieces, next(tiny(text).batches(1, 0, 2)).pieces)


def test_evaluation_sums_add_up_over_ranks(text):
    one = tiny(text)
    model = one.model()
    parts = [one.evaluate(model, rank, 2) for rank in range(2)]
    totals = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    assert totals["pairs"] == len(one.valid)
    assert parts[0] == one.evaluate(model, 0, 2), "validation hides the same words every time"
    summary = one.summarize(totals)
    assert summary["perplexity"] == pytest.approx(math.exp(summary["loss"]))
    assert 0 <= summary["nsp_accuracy"] <= 1 and model.training
    assert one.summarize(dict.fromkeys(totals, 0.0)) == {}


def test_the_loss_is_that_of_transformers(text):
    """Only wanted positions are decoded; the sum of both losses must be what the library itself computes."""
    one = tiny(text)
    model = one.model().eval()
    batch = next(one.batches(0, 0, 1))
    reference = model.network(
        input_ids=batch.pieces, token_type_ids=batch.segments, attention_mask=batch.present.long(),
        labels=batch.labels, next_sentence_label=batch.unrelated,
    ).loss  # fmt: skip
    assert one.loss(model, batch).item() == pytest.approx(reference.item(), rel=1e-5)


def test_it_learns(text):
    one = tiny(text)
    torch.manual_seed(0)
    model = one.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = losses_of(one, model, optimizer, chain.from_iterable(one.batches(epoch, 0, 1) for epoch in range(4)))
    assert np.mean(losses[-5:]) < 0.75 * np.mean(losses[:5])


def test_the_paper_sized_vocabulary_is_kept_when_the_trained_one_is_smaller(text):
    one = tiny(text)
    assert len(one.pieces) < PRESETS["tiny"].shape.vocabulary
    assert one.model().network.config.vocab_size == PRESETS["tiny"].shape.vocabulary


def test_bad_text_names_file_and_remedy(tmp_path):
    lonely = tmp_path / "lonely.txt"
    lonely.write_text("one sentence .\n\nanother sentence .\n\n" * 20)
    with pytest.raises(DataError, match=r"lonely.txt: 0 train documents .* 38 have one.*one sentence per line"):
        load_corpus(str(lonely), None, 100)
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    with pytest.raises(DataError, match=r"empty.txt: the train text is empty"):
        load_corpus(str(empty), None, 100)
    short = tmp_path / "short.txt"
    short.write_text("a b c\nd e f\n\ng h i\nj k l\n\n" * 2)
    with pytest.raises(DataError, match=r"short.txt: 1 valid documents"):
        load_corpus(str(short), None, 100)
    with pytest.raises(DataError, match=r"gone.txt is no file"):
        load_corpus(str(short), str(tmp_path / "gone.txt"), 100)


def test_single_sentences_among_others_are_left_out_and_counted(tmp_path):
    path = tmp_path / "mixed.txt"
    path.write_text("one alone .\n\ntwo here .\nand there .\n\n" * 30)
    one = tiny(path)
    assert one.train.skipped + one.valid.skipped == 30
    assert one.notices == ("30 documents of one sentence make no pair and are left out.",)


def test_long_sentences_and_long_documents_still_make_pairs(tmp_path):
    path = tmp_path / "long.txt"
    long = " ".join(f"w{number % 30}" for number in range(100))
    path.write_text("\n\n".join("\n".join([long, "a b", long][: 2 + n % 2]) for n in range(50)) + "\n")
    folder = load_corpus(str(path), None, 200)[0]
    passages = Corpus(folder, "train", LENGTH)
    assert len(passages) >= 47
    for number in range(len(passages)):
        a, b, _ = passages.pair(number, np.random.default_rng(number))
        assert len(a) > 0 and len(b) > 0 and len(a) + len(b) <= LENGTH - 3


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match="Did you mean 'base'"):
        BertConfig(preset="bas")
    with pytest.raises(ConfigError, match=r"length must be in 8..512, got 4"):
        BertConfig(length=4)
    assert workload_classes("bert") == (BertConfig, BertWorkload)
    assert replace(PRESETS["base"].shape).positions == 512
    assert Pieces(SPECIAL).ordinary == []
