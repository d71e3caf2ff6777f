"""The gpt workload: tokens, windows, the decoder, perplexity."""

from __future__ import annotations

import math
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from oktopk.errors import ConfigError, DataError, UnsupportedError
from oktopk.training.learning_rate import learning_rate
from oktopk.workloads import workload_classes
from oktopk.workloads.gpt.data import load_text, make_batch, windows
from oktopk.workloads.gpt.model import Decoder, Shape
from oktopk.workloads.gpt.tokens import UNKNOWN, Characters
from oktopk.workloads.gpt.workload import PRESETS, GptConfig, GptWorkload
from workload_checks import assert_shards_add_up, losses_of

torch.set_num_threads(1)  # tests run side by side: more threads than cores only wait for each other
TEXT = "".join(f"  {number} times {number % 7} is {number * (number % 7)};\n" for number in range(600))
SMALL = Shape(hidden=16, layers=2, heads=2, length=8, vocabulary=11, bias=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "tables.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def workload(text: Path, **options) -> GptWorkload:
    return GptWorkload(GptConfig(preset="tiny", data=str(text), **options), seed=0)


def decoder(shape: Shape = SMALL) -> Decoder:
    torch.manual_seed(0)
    return Decoder(shape).eval()


@pytest.mark.parametrize(("preset", "expected"), [("tiny", 108_864), ("small", 812_160), ("124m", 124_439_808)])
def test_every_preset_has_its_number_of_parameters(preset, expected):
    with torch.device("meta"):
        model = Decoder(PRESETS[preset].shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_characters_are_numbered_by_frequency_and_rare_ones_are_one(tmp_path):
    (tmp_path / "train.txt").write_text("bbb aa\n c\u00e9", encoding="utf-8")
    (tmp_path / "valid.txt").write_text("ab\U0001f600", encoding="utf-8")
    prepared = load_text(str(tmp_path), "characters", 5)
    assert isinstance(prepared.tokens, Characters) and prepared.tokens.characters == "b a\n" + UNKNOWN
    assert prepared.train.tolist() == [0, 0, 0, 1, 2, 2, 3, 1, 4, 4]
    assert prepared.valid.tolist() == [2, 0, 4]


def test_text_comes_back_as_it_was_with_its_white_space(text):
    for kind, size in (("characters", 128), ("bpe", 300)):
        if kind == "bpe":
            pytest.importorskip("tokenizers")
        prepared = load_text(str(text), kind, size)
        numbers = [*prepared.train.tolist(), *prepared.valid.tolist()]
        assert prepared.tokens.decode(numbers) == TEXT
        assert len(prepared.tokens) <= size and max(numbers) < len(prepared.tokens)


def test_byte_pairs_shorten_the_text_know_every_byte_and_are_the_same_twice(text, tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    first = load_text(str(text), "bpe", 300)
    assert len(first.tokens) == 300 and len(first.train) + len(first.valid) < len(TEXT) / 1.5
    strange = "na\u00efve \U0001f600\x00"
    assert first.tokens.decode(first.tokens.encode(strange).tolist()) == strange
    monkeypatch.setenv("OKTOPK_CACHE", str(tmp_path / "elsewhere"))
    again = load_text(str(text), "bpe", 300)
    assert np.array_equal(first.train, again.train)


def test_without_tokenizers_byte_pairs_name_the_extra_and_characters_work(text, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'oktopk\[bert\]'"):
        workload(text, tokens="bpe", vocabulary=300)
    assert workload(text).steps_per_epoch(1) > 0


def test_the_last_tenth_is_held_out_when_there_is_no_validation_file(text):
    prepared = load_text(str(text), "characters", 128)
    assert len(prepared.valid) == len(TEXT) // 10
    assert TEXT.endswith(prepared.tokens.decode(prepared.valid.tolist()))


# -- windows ---------------------------------------------------------------------------------------------------------


def test_targets_are_the_tokens_after_the_inputs():
    stream = np.arange(100, dtype=np.uint16)
    inputs, targets = make_batch(stream, np.array([0, 91]), 8)
    assert inputs.tolist() == [list(range(8)), list(range(91, 99))] and torch.equal(targets, inputs + 1)
    assert [windows(stream[:count], 8) for count in (0, 8, 9, 16, 17)] == [0, 0, 1, 1, 2]


def test_ranks_read_different_windows_and_a_resumed_epoch_goes_on(text):
    one = workload(text, batch_size=4, epoch_steps=9)
    whole = [list(one.batches(1, rank, 2)) for rank in (0, 1)]
    assert len(whole[0]) == len(whole[1]) == one.steps_per_epoch(2) == 9
    resumed = list(workload(text, batch_size=4, epoch_steps=9).batches(1, 1, 2, start=6))
    assert len(resumed) == 3 and all(torch.equal(a[0], b[0]) for a, b in zip(resumed, whole[1][6:], strict=True))
    assert not torch.equal(whole[0][0][0], whole[1][0][0])
    assert not torch.equal(whole[0][0][0], next(one.batches(2, 0, 2))[0])


def test_an_epoch_without_a_limit_reads_nearly_all_of_the_text(text):
    one = workload(text, batch_size=2, epoch_steps=0)
    seen = sum(inputs.numel() for rank in range(3) for inputs, _ in one.batches(0, rank, 3))
    assert 0.95 * len(one.text.train) < seen <= len(one.text.train)


# -- the decoder -----------------------------------------------------------------------------------------------------


def test_a_position_sees_what_came_before_it_and_nothing_else():
    tokens = torch.randint(0, 11, (1, 8), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    model = decoder()
    difference = (model(tokens) - model(changed)).abs().sum(-1)[0]
    assert torch.all(difference[:5] == 0) and torch.all(difference[5:] > 0)


def plain_attention(model: Decoder, x: Tensor, layer: int) -> Tensor:
    """One head after the other, with an explicit mask."""
    attention, size = model.blocks[layer].attention, SMALL.hidden // SMALL.heads
    queries, keys, values = (x @ attention.inputs.weight.t() + attention.inputs.bias).split(SMALL.hidden, dim=-1)
    mask = torch.triu(torch.full((x.shape[1], x.shape[1]), -math.inf), 1)
    heads = []
    for first in range(0, SMALL.hidden, size):
        q, k, v = (part[..., first : first + size] for part in (queries, keys, values))
        heads.append(torch.softmax(q @ k.transpose(1, 2) / size**0.5 + mask, -1) @ v)
    return torch.cat(heads, -1) @ attention.output.weight.t() + attention.output.bias


def test_attention_is_the_textbooks():
    model = decoder()
    x = torch.randn(2, 8, SMALL.hidden, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(model.blocks[1].attention(x), plain_attention(model, x, 1), atol=1e-6)


def test_fresh_weights_spread_as_in_gpt_2_and_the_first_loss_is_that_of_chance():
    shape = PRESETS["small"].shape
    model = decoder(shape)
    block = model.blocks[0]
    assert block.attention.inputs.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (block.attention.output.weight, block.perceptron.output.weight):
        assert weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    tokens = torch.randint(0, shape.vocabulary, (4, 65), generator=torch.Generator().manual_seed(3))
    logits = model(tokens[:, :-1]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(shape.vocabulary), abs=0.1)


# -- training and scoring --------------------------------------------------------------------------------------------


def test_evaluation_sums_are_the_same_over_any_number_of_ranks(text):
    one = workload(text, valid_windows=20)
    model = one.model()
    alone = assert_shards_add_up(one, model, (3, 40))  # 40: more ranks than examples, so some have nothing to do
    assert alone["tokens"] == 20 * 32
    summary = one.summarize(alone)
    assert summary["perplexity"] == pytest.approx(math.exp(summary["loss"]))
    assert one.summarize({"loss_sum": 0.0, "tokens": 0.0}) == {} and model.training


def test_of_a_long_validation_text_examples_from_all_over_are_scored(text):
    everything, some = workload(text, valid_windows=0), workload(text, valid_windows=7)
    model = everything.model()
    assert everything.evaluate(model, 0, 1)["tokens"] == windows(everything.text.valid, 32) * 32
    assert some.evaluate(model, 0, 1)["tokens"] == 7 * 32


def test_it_learns_multiplication_tables(text):
    one = workload(text)
    torch.manual_seed(0)
    model = one.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses_of(one, model, optimizer, chain(one.batches(0, 0, 1), one.batches(1, 0, 1)))
    by_frequency = np.bincount(one.text.train) / len(one.text.train)
    alone = math.exp(-np.log(by_frequency[one.text.valid]).mean())  # what characters without context allow
    assert one.summarize(one.evaluate(model, 0, 1))["perplexity"] < alone / 2


def test_the_rate_rises_from_zero_and_falls_to_a_tenth_in_600_steps():
    recipe = PRESETS["small"].recipe
    rates = [learning_rate(recipe, step, PRESETS["small"].epoch_steps, 2) for step in range(601)]
    assert rates[0] < 0.02 * recipe.lr and max(rates) == pytest.approx(recipe.lr)
    assert rates[600] == pytest.approx(0.1 * recipe.lr) and rates[350] == pytest.approx(0.55 * recipe.lr)


# -- what is given ---------------------------------------------------------------------------------------------------


def test_flags_change_the_shape_that_the_preset_has():
    assert GptConfig(preset="124m").shape == PRESETS["124m"].shape
    assert GptConfig(tokens="bpe").shape.vocabulary == 2_000
    assert GptConfig(preset="124m", tokens="characters").shape.vocabulary == 128
    shape = GptConfig(length=100, vocabulary=90).shape
    assert (shape.length, shape.vocabulary, shape.hidden) == (100, 90, 128)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "smal"}, "unknown gpt preset 'smal'"),
        ({"tokens": "words"}, "unknown tokens 'words'"),
        ({"batch_size": 0}, "batch_size must be 1 or more, got 0"),
        ({"length": 0}, "length must be 1 or more, got 0"),
        ({"vocabulary": 1}, "vocabulary must be 2 or more with tokens 'characters', got 1"),
        ({"vocabulary": 100, "tokens": "bpe"}, "vocabulary must be 257 or more with tokens 'bpe', got 100"),
    ],
)
def test_nonsense_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        GptConfig(**options)


def test_text_that_is_too_short_names_file_and_remedy(tmp_path, text):
    with pytest.raises(DataError, match=r"fewer than one batch of 12 for each of 500 ranks: lower batch_size"):
        workload(text).steps_per_epoch(500)
    with pytest.raises(DataError, match=r"tables.txt has \d+ validation tokens.*lower length"):
        workload(text, length=5_000)
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(DataError, match=r"empty.txt is empty"):
        workload(empty)


def test_the_workload_is_registered():
    assert workload_classes("gpt") == (GptConfig, GptWorkload)
