"""The ptb workload: words, columns, the carried state, perplexity."""

from __future__ import annotations

import math

import pytest
import torch

from oktopk.errors import ConfigError, DataError
from oktopk.workloads import workload_classes
from oktopk.workloads.ptb.data import EOS, UNKNOWN, columns, load_words, windows
from oktopk.workloads.ptb.model import WordLSTM
from oktopk.workloads.ptb.workload import PRESETS, PtbConfig, PtbWorkload
from workload_checks import assert_shards_add_up, losses_of

torch.set_num_threads(1)  # tests run side by side: more threads than cores only wait for each other


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def corpus(tmp_path):
    """A folder in PTB's layout whose text is easy to learn: a cycle of 40 words."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name, lines in (("ptb.train.txt", 200), ("ptb.valid.txt", 40), ("ptb.test.txt", 40)):
        text = [" ".join(f"w{(line * 10 + place) % 40}" for place in range(10)) for line in range(lines)]
        (folder / name).write_text(" " + " \n ".join(text) + " \n", encoding="utf-8")
    return folder


def workload(corpus, **options) -> PtbWorkload:
    return PtbWorkload(PtbConfig(data=str(corpus), vocabulary=50, batch_size=4, **options), seed=0)


def count(vocabulary: int, preset: str) -> int:
    shape = PRESETS[preset]
    with torch.device("meta"):
        model = WordLSTM(vocabulary, shape.hidden, shape.layers, shape.dropout)
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_preset_has_its_number_of_parameters():
    assert count(10_000, "ptb") == 66_034_000
    assert count(33_278, "wikitext2") == 2 * 1500 * 33_278 + 33_278 + 36_024_000
    assert count(PRESETS["small"].vocabulary, "small") == SMALL
    assert set(PRESETS) == {"ptb", "wikitext2", "small"}


SMALL = 4_000 * 128 * 2 + 4_000 + 4 * 128 * (2 * 128 + 2)


def test_the_papers_settings_are_in_the_preset():
    preset = PRESETS["ptb"]
    assert (preset.hidden, preset.layers, preset.dropout, preset.steps, preset.vocabulary) == (
        1500,
        2,
        0.65,
        35,
        10_000,
    )
    assert preset.recipe.norm_clip == 0.25 and preset.recipe.density == 0.02


def test_words_are_numbered_by_frequency_and_rare_ones_become_unknown(tmp_path):
    (tmp_path / "train.txt").write_text("b b b a a c\n\na b\n", encoding="utf-8")
    (tmp_path / "valid.txt").write_text("a zebra\n", encoding="utf-8")
    words = load_words(str(tmp_path), vocabulary=4)
    assert words.vocabulary == ("b", EOS, "a", UNKNOWN)
    assert words.train.tolist() == [0, 0, 0, 2, 2, 3, 1, 1, 2, 0, 1]
    assert words.valid.tolist() == [2, 3, 1]


def test_a_vocabulary_that_is_large_enough_keeps_every_word(tmp_path):
    (tmp_path / "train.txt").write_text("x <unk> y\n", encoding="utf-8")
    (tmp_path / "valid.txt").write_text("y x\n", encoding="utf-8")
    assert load_words(str(tmp_path), 100).vocabulary == (EOS, UNKNOWN, "x", "y")


def test_columns_and_windows_read_the_stream_downwards():
    table = columns(torch.arange(23), 3)
    assert table.shape == (7, 3) and table[:, 1].tolist() == list(range(7, 14))
    inputs, targets = zip(*windows(table, 4), strict=True)
    assert [len(part) for part in inputs] == [4, 2]
    assert all(torch.equal(a + 1, b) for a, b in zip(inputs, targets, strict=True))


def test_ranks_read_different_columns_and_a_resumed_epoch_goes_on(corpus):
    whole = [list(workload(corpus).batches(0, rank, 2)) for rank in (0, 1)]
    assert len(whole[0]) == workload(corpus).steps_per_epoch(2) == 7
    table = columns(workload(corpus).words.train, 8)
    assert torch.equal(torch.cat([whole[0][0][0], whole[1][0][0]], dim=1), table[:35])
    resumed = list(workload(corpus).batches(0, 1, 2, start=4))
    assert len(resumed) == 3 and torch.equal(resumed[0][1], whole[1][4][1])


def test_the_hidden_state_is_carried_detached_and_saved(corpus):
    first = workload(corpus)
    torch.manual_seed(0)
    model = first.model().eval()
    batches = list(first.batches(0, 0, 1))
    first.loss(model, batches[0]).backward()
    state = first.state_dict()
    assert not state["hidden"].requires_grad and state["hidden"].abs().sum() > 0
    carried = first.loss(model, batches[1]).item()
    resumed = workload(corpus)
    resumed.load_state_dict(state)
    later = next(resumed.batches(0, 0, 1, start=1))
    assert resumed.loss(model, later).item() == carried
    fresh = workload(corpus)
    assert fresh.state_dict() == {}
    assert fresh.loss(model, batches[1]).item() != carried


def test_an_epoch_starts_from_zero(corpus):
    one = workload(corpus)
    model = one.model().eval()
    losses = [[one.loss(model, batch).item() for batch in one.batches(epoch, 0, 1)] for epoch in (0, 1)]
    assert losses[0] == losses[1]


def test_evaluation_sums_are_the_same_over_any_number_of_ranks(corpus):
    one = workload(corpus)
    torch.manual_seed(0)
    model = one.model()
    one.loss(model, next(one.batches(0, 0, 1)))
    before = one.state_dict()
    alone = assert_shards_add_up(one, model, (3, 20))  # 20: more ranks than columns, so some have nothing to do
    summary = one.summarize(alone)
    assert summary["perplexity"] == pytest.approx(math.exp(summary["loss"]))
    assert one.summarize({"loss_sum": 0.0, "words": 0.0}) == {}
    assert model.training and torch.equal(before["hidden"], one.state_dict()["hidden"])


def test_it_learns_a_cycle_of_words(corpus):
    one = workload(corpus)
    torch.manual_seed(0)
    model = one.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=one.recipe.lr)
    start = one.summarize(one.evaluate(model, 0, 1))["perplexity"]
    for epoch in range(8):
        losses_of(one, model, optimizer, one.batches(epoch, 0, 1), clip=0.25)
    assert one.summarize(one.evaluate(model, 0, 1))["perplexity"] < start / 2


def test_bad_input_names_file_and_remedy(tmp_path, corpus):
    with pytest.raises(ConfigError, match="unknown ptb preset"):
        PtbConfig(preset="smal")
    with pytest.raises(ConfigError, match="batch_size"):
        PtbConfig(batch_size=0)
    with pytest.raises(DataError, match=r"too few for 500 ranks.*lower batch_size"):
        workload(corpus).steps_per_epoch(500)
    (corpus / "ptb.train.txt").write_text(" \n", encoding="utf-8")
    with pytest.raises(DataError, match=r"ptb.train.txt holds no words"):
        workload(corpus).model()
    (corpus / "ptb.valid.txt").unlink()
    with pytest.raises(DataError, match=r"ptb.train.txt but no ptb.valid.txt"):
        workload(corpus).model()
    alone = tmp_path / "alone.txt"
    alone.write_text("one text\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"alone.txt is one text without a validation part"):
        workload(alone).model()


def test_the_workload_is_registered():
    assert workload_classes("ptb") == (PtbConfig, PtbWorkload)
