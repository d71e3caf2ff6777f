"""The recognisers: parameters, features, padding, batches, decoding, scores, and that they learn."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path

import jiwer
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.cli import main
from oktopk.errors import ConfigError, DataError, UnsupportedError
from oktopk.workloads import WORKLOADS, workload_classes
from oktopk.workloads.speech.corpus import find_corpus
from oktopk.workloads.speech.decode import greedy, prefix_beam
from oktopk.workloads.speech.features import Augment, LogMel, Spectrogram, features, frame_count, mel_matrix
from oktopk.workloads.speech.lstm import FrameLSTM
from oktopk.workloads.speech.model import BothWays, LookAhead, PaperNet, SmallNet
from oktopk.workloads.speech.sampler import LengthSampler
from oktopk.workloads.speech.score import error_rates, error_sums
from oktopk.workloads.speech.text import ALPHABET, encode
from oktopk.workloads.speech.workload import PRESETS, SpeechConfig, SpeechWorkload
from workload_checks import assert_shards_add_up, losses_of

OKTOPK_DATA = os.environ.get("OKTOPK_DATA", "")
needs_an4 = pytest.mark.skipif(not OKTOPK_DATA, reason="OKTOPK_DATA does not point to the real corpora")


@pytest.fixture(scope="module", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    patch = pytest.MonkeyPatch()
    patch.setenv("OKTOPK_CACHE", str(tmp_path_factory.mktemp("cache")))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small lose by sharing cores
    yield
    torch.set_num_threads(threads)
    patch.undo()


@pytest.fixture(scope="module")
def workload(shared_cache: object) -> SpeechWorkload:
    return SpeechWorkload(SpeechConfig(data="synth-an4:24", batch_size=4), seed=3)


def same(a: object, b: object) -> bool:
    return all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in ("inputs", "lengths", "labels", "label_lengths")
    )


# Networks


def test_the_papers_network_has_27569568_parameters_in_40_tensors() -> None:
    with torch.device("meta"):
        parameters = list(PaperNet().parameters())
    assert sum(parameter.numel() for parameter in parameters) == 27_569_568
    assert len(parameters) == 40


def test_the_small_network_has_half_to_two_million_parameters(workload: SpeechWorkload) -> None:
    assert 500_000 <= sum(parameter.numel() for parameter in workload.model().parameters()) <= 2_000_000


def test_the_papers_network_maps_161_bins_and_halves_time() -> None:
    model = PaperNet(hidden=16).eval()
    log_probs, lengths = model(torch.randn(2, 161, 51), torch.tensor([51, 30]))
    assert log_probs.shape == (2, 26, 29) and lengths.tolist() == [26, 15]
    assert model.lstms[0].input_size == 1312
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2, 26))


@pytest.mark.parametrize("model", [PaperNet(hidden=16), SmallNet(161, hidden=16)], ids=["paper", "small"])
def test_padding_changes_nothing(model: torch.nn.Module) -> None:
    torch.manual_seed(0)
    model.eval()
    x = torch.randn(1, 161, 40)
    alone, (steps,) = model(x, torch.tensor([40]))
    padded = torch.zeros(2, 161, 70)
    padded[0, :, :40] = x[0]
    padded[1] = torch.randn(161, 70)
    beside, lengths = model(padded, torch.tensor([40, 70]))
    assert lengths[0] == steps
    torch.testing.assert_close(beside[0, :steps], alone[0], atol=1e-5, rtol=1e-5)  # float32, other batch shape


def test_padding_does_not_enter_the_running_statistics() -> None:
    means = []
    for frames in (60, 90):
        torch.manual_seed(0)
        model = PaperNet(hidden=16)
        model.norm1.eval(), model.norm2.eval()  # those of the convolutions do count it, as the paper's
        x = torch.zeros(2, 161, frames)
        x[0, :, :60], x[1, :, :40] = torch.randn(161, 60), torch.randn(161, 40)
        model(x, torch.tensor([60, 40]))
        means.append([norm.running_mean for norm in (*model.norms, model.norm_out)])
    for short, long in zip(*means, strict=True):
        torch.testing.assert_close(short, long)


@pytest.mark.parametrize(("precision", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_our_lstm_is_that_of_torch(precision: torch.dtype, error: float) -> None:
    """`error`: of the norm; rounding of sums over 24 frames, and of bfloat16 with its 8 bits."""
    torch.manual_seed(0)
    ours, theirs = FrameLSTM(20, 32, batch_first=True), torch.nn.LSTM(20, 32, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    inputs = [torch.randn(3, 24, 20).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0].data)
    outputs = []
    for lstm, x in zip((ours, theirs), inputs, strict=True):
        packed = torch.nn.utils.rnn.pack_padded_sequence(
            x, torch.tensor([9, 24, 15]), batch_first=True, enforce_sorted=False
        )
        with torch.autocast("cpu", precision, enabled=lstm is ours and precision != torch.float32):
            out = lstm(packed)
        out = (out[0] if lstm is theirs else out).data
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        outputs.append(out)
    pairs = [
        outputs,
        [x.grad for x in inputs],
        *([p.grad, q.grad] for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)),
    ]
    for got, expected in pairs:
        assert got.dtype == torch.float32 and (got - expected).norm() <= error * expected.norm()


def test_two_lstms_read_as_a_packed_bidirectional_one() -> None:
    torch.manual_seed(0)
    ours, theirs = BothWays(5, 7), torch.nn.LSTM(5, 7, batch_first=True, bidirectional=True)
    for name, weight in ours.forwards.named_parameters():
        theirs.get_parameter(name).data.copy_(weight.data)
        theirs.get_parameter(name + "_reverse").data.copy_(ours.backwards.get_parameter(name).data)
    x, lengths = torch.randn(3, 9, 5), torch.tensor([9, 4, 1])
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
    expected, _ = torch.nn.utils.rnn.pad_packed_sequence(theirs(packed)[0], batch_first=True)
    got = ours(x, lengths)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(got[row, :length], expected[row, :length])


def test_look_ahead_sees_20_frames_of_the_future_and_none_of_the_past() -> None:
    layer = LookAhead(3, 20)
    x = torch.randn(1, 50, 3, requires_grad=True)
    layer(x)[0, 10].sum().backward()
    touched = x.grad[0].abs().sum(1).nonzero().flatten().tolist()
    assert touched == list(range(10, 31))


# Features


def test_features_have_the_published_shape_and_are_normalised() -> None:
    samples = (torch.randn(16_000, generator=torch.Generator().manual_seed(0)) * 3000).to(torch.int16)
    spectrogram = features(samples, Spectrogram())
    assert spectrogram.shape == (161, 101) == (161, frame_count(16_000))
    assert abs(float(spectrogram.mean())) < 1e-4 and abs(float(spectrogram.std()) - 1) < 1e-3
    assert features(samples, LogMel(stack=4, bands=40)).shape == (160, 26)


def test_stacked_frames_keep_their_order() -> None:
    samples = (torch.randn(16_000) * 3000).to(torch.int16)
    plain, stacked = features(samples, LogMel(1, 40)), features(samples, LogMel(4, 40))
    assert torch.equal(stacked[40:80, 3], plain[:, 13])


def test_mel_bands_all_hear_something_and_peak_in_order() -> None:
    matrix = mel_matrix(40)
    assert (matrix.sum(1) > 0).all() and (matrix.argmax(1).diff() >= 0).all()


def test_a_tone_shows_at_its_frequency() -> None:
    tone = (8000 * torch.sin(2 * math.pi * 1000 * torch.arange(16_000) / 16_000)).to(torch.int16)
    assert int(features(tone, Spectrogram()).mean(1).argmax()) == 20  # 50 Hz per bin


def test_augmentation_is_a_function_of_its_generator_and_respects_the_limits() -> None:
    samples = (torch.randn(16_000) * 3000).to(torch.int16)
    augment = Augment(noise=(10.0, 30.0), mask_bands=1, mask_spans=1)

    def distorted(seed: int, fastest: float = math.inf) -> torch.Tensor:
        return features(samples, Spectrogram(), augment, torch.Generator().manual_seed(seed), fastest)

    assert torch.equal(distorted(1), distorted(1))
    lengths = {distorted(seed).shape[1] for seed in range(60)}
    assert min(lengths) >= round(101 / 1.15) and max(lengths) <= round(101 / 0.85) and len(lengths) > 10
    assert min(distorted(seed, fastest=1.0).shape[1] for seed in range(20)) == 101


def test_noise_is_as_loud_as_asked() -> None:
    samples = (8000 * torch.sin(torch.arange(160_000) / 20)).to(torch.int16)
    augment = Augment(tempo=(1.0, 1.0), gain=(0.0, 0.0), noise=(0.0, 0.0))
    clean = features(samples, LogMel(1, 40))
    noisy = features(samples, LogMel(1, 40), augment, torch.Generator().manual_seed(0))
    assert (clean - noisy).abs().mean() > 0.1


# Batches


@settings(max_examples=50, deadline=None)
@given(st.integers(4, 60), st.integers(1, 9), st.integers(1, 4), st.integers(0, 3))
def test_ranks_get_equally_many_batches_and_no_utterance_twice(count: int, batch: int, world: int, epoch: int) -> None:
    sampler = LengthSampler(list(range(100, 100 + count)), batch, seed=1)
    ranks = [sampler.batches(epoch, rank, world) for rank in range(world)]
    assert {len(batches) for batches in ranks} == {sampler.steps(world)} and sampler.steps(world) > 0
    sizes = {len(chosen) for batches in ranks for chosen in batches}
    seen = [index for batches in ranks for chosen in batches for index in chosen]
    assert len(sizes) == 1 and len(seen) == len(set(seen)) > count - world * batch


def test_an4_on_8_workers_with_batch_8_has_14_batches() -> None:
    assert LengthSampler([1] * 948, 8, seed=0).steps(8) == 14


def test_batches_hold_similar_lengths_and_epochs_differ() -> None:
    lengths = torch.randint(10_000, 100_000, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = LengthSampler(lengths, 8, seed=0)
    batches = sampler.batches(2, 0, 2)
    waste = [max(lengths[i] for i in b) / (sum(lengths[i] for i in b) / len(b)) for b in batches]
    assert sum(waste) / len(waste) < 1.2  # random batches of 8 would need 1.6
    assert batches != sampler.batches(1, 0, 2) and batches == sampler.batches(2, 0, 2)
    assert batches != LengthSampler(lengths, 8, seed=1).batches(2, 0, 2)


def test_the_first_epoch_goes_from_short_to_long() -> None:
    lengths = torch.randint(10_000, 100_000, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    means = [sum(lengths[i] for i in chosen) / 8 for chosen in LengthSampler(lengths, 8, seed=0).batches(0, 1, 2)]
    assert all(b > 0.9 * a for a, b in itertools.pairwise(means)) and means[-1] > 5 * means[0]


def test_fewer_utterances_than_ranks_is_refused() -> None:
    with pytest.raises(DataError, match="5 ranks need at least 5 training utterances, the corpus has 3"):
        LengthSampler([1, 2, 3], 8, seed=0).steps(5)


def test_a_run_resumed_inside_an_epoch_sees_the_same_batches(workload: SpeechWorkload) -> None:
    whole = list(workload.batches(2, 0, 2))
    again = SpeechWorkload(SpeechConfig(data="synth-an4:24", batch_size=4), seed=3)
    rest = list(again.batches(2, 0, 2, start=1))
    assert len(whole) == 3 and all(same(a, b) for a, b in zip(whole[1:], rest, strict=True))
    assert not same(whole[1], next(again.batches(3, 0, 2, start=1)))


# Decoding


def brute_force(log_probs: torch.Tensor) -> str:
    """The likeliest text, by walking every path."""
    totals: dict[str, float] = {}
    steps, labels = log_probs.shape
    for path in itertools.product(range(labels), repeat=steps):
        merged = [label for label, _ in itertools.groupby(path)]
        text = "".join(ALPHABET[label] for label in merged if label)
        totals[text] = totals.get(text, 0.0) + math.exp(sum(float(log_probs[t, c]) for t, c in enumerate(path)))
    return max(totals, key=lambda text: totals[text])


@pytest.mark.parametrize("seed", range(8))
def test_prefix_beam_finds_the_likeliest_text(seed: int) -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)) * 2
    log_probs = logits.log_softmax(-1)
    assert prefix_beam(log_probs, width=200) == brute_force(log_probs)


def test_beam_beats_greedy_where_paths_add_up() -> None:
    log_probs = torch.tensor([[0.4, 0.0, 0.3, 0.3], [0.4, 0.0, 0.6, 0.0]]).clamp(min=1e-9).log()
    assert greedy(log_probs) == "A" and prefix_beam(log_probs) == "A"
    flat = torch.tensor([[0.6, 0.0, 0.4], [0.6, 0.0, 0.4]]).clamp(min=1e-9).log()
    assert greedy(flat) == "" and prefix_beam(flat) == "A"  # 0.36 for nothing, 0.64 for A


def test_greedy_keeps_doubled_letters_that_a_blank_parts() -> None:
    path = [encode("L")[0], 0, encode("L")[0], encode("L")[0]]
    log_probs = torch.nn.functional.one_hot(torch.tensor(path), 29).float().clamp(min=1e-6).log()
    assert greedy(log_probs) == "LL"


# Scores


def test_error_sums_add_up_over_shards_to_the_corpus_rate() -> None:
    references = ["GO ON", "STOP", "M A R Y", "YES"]
    hypotheses = ["GO", "STOP IT NOW", "M A Y", ""]
    shards = [error_sums(references[rank::3], hypotheses[rank::3]) for rank in range(3)]
    totals = {name: sum(shard[name] for shard in shards) for name in shards[0]}
    assert error_rates(totals)["WER"] == pytest.approx(jiwer.wer(references, hypotheses)) == 5 / 8
    assert error_rates(totals)["CER"] == pytest.approx(jiwer.cer(references, hypotheses))
    assert error_rates(error_sums(["GO"], ["A B C"]))["WER"] == 3.0  # it may exceed 1


def test_no_data_gives_no_rate_rather_than_nan(workload: SpeechWorkload) -> None:
    assert error_rates(error_sums([], [])) == {} and workload.summarize({}) == {}
    assert workload.summarize({"loss": 0.0, "utterances": 0.0, "words": 0.0, "characters": 0.0}) == {}


# The workload


def test_validation_shards_sum_to_the_whole(workload: SpeechWorkload) -> None:
    torch.manual_seed(0)
    model = workload.model()
    summary = workload.summarize(assert_shards_add_up(workload, model, (3,)))
    assert set(summary) == {"loss", "WER", "CER"} and all(math.isfinite(value) for value in summary.values())
    assert model.training


def test_more_ranks_than_validation_utterances_is_fine(workload: SpeechWorkload) -> None:
    sums = workload.evaluate(workload.model(), 9, 10)
    assert sums["utterances"] == 0 and set(sums) == set(workload.evaluate(workload.model(), 0, 10))


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_augmented_batches_always_have_steps_enough_for_their_labels(preset: str, workload: SpeechWorkload) -> None:
    entries = find_corpus("synth-an4:24").train
    stride = PRESETS[preset].stride
    fast = PRESETS[preset].augment.tempo[1]
    for utterance in workload._train[: len(entries)]:
        frames = round(frame_count(utterance.length) / min(fast, utterance.fastest))
        assert -(-frames // stride) >= len(utterance.labels)


def test_loss_is_torchs_ctc_per_character(workload: SpeechWorkload) -> None:
    torch.manual_seed(0)
    model = workload.model().eval()
    batch = next(workload.batches(0, 0, 1))
    log_probs, lengths = model(batch.inputs, batch.lengths)
    expected = torch.nn.functional.ctc_loss(log_probs.transpose(0, 1), batch.labels, lengths, batch.label_lengths)
    torch.testing.assert_close(workload.loss(model, batch), expected)


def test_a_few_steps_lower_the_loss(workload: SpeechWorkload) -> None:
    torch.manual_seed(0)
    model, batch = workload.model(), next(workload.batches(0, 0, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = losses_of(workload, model, optimizer, [batch] * 8)
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]


def test_skipping_bad_audio_is_counted_in_words(tmp_path: Path) -> None:
    corpus = find_corpus("synth-an4:24")
    rows = [f"{entry.path},{entry.text}" for entry in corpus.train]
    for name in ("train", "validation"):
        (tmp_path / f"{name}.csv").write_text("\n".join(["wav,txt", *rows, "gone.wav,YES"]) + "\n")
    with pytest.raises(DataError, match=r"1 of 25 training, 1 of 25 validation utterances(.|\n)*gone\.wav"):
        SpeechWorkload(SpeechConfig(data=str(tmp_path)), seed=0)
    skipped = SpeechWorkload(SpeechConfig(data=str(tmp_path), on_bad_audio="skip"), seed=0)
    assert len(skipped.notices) == 2 and "skipped 1 training utterances" in skipped.notices[0]


def test_an_empty_validation_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("wav,txt\n")
    with pytest.raises(DataError, match="validation set is empty"):
        SpeechWorkload(SpeechConfig(data="synth-an4:24", validation=str(tmp_path / "empty.csv")), seed=0)


def test_wrong_settings_are_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'lstman4'"):
        SpeechConfig(preset="lstm_an4")
    with pytest.raises(ConfigError, match="on_bad_audio"):
        SpeechConfig(on_bad_audio="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="decoder"):
        SpeechWorkload(SpeechConfig(data="synth-an4:24", decoder="magic"), seed=0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_size"):
        SpeechConfig(batch_size=0)


def test_an_unknown_workload_gets_a_hint_and_a_missing_module_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workload_classes("speech") == (SpeechConfig, SpeechWorkload)
    with pytest.raises(ConfigError, match="Did you mean 'speech'"):
        workload_classes("speach")
    monkeypatch.setitem(WORKLOADS, "speech", ("not_there:Config", "not_there:Workload", "speech"))
    with pytest.raises(UnsupportedError, match=r"'not_there': pip install 'oktopk\[speech\]'"):
        workload_classes("speech")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_papers_network_learns_a_tiny_set() -> None:
    workload = SpeechWorkload(SpeechConfig(preset="lstman4", data="synth-an4:4", augment=False), seed=0)
    torch.manual_seed(0)
    model, batch = workload.model(), next(workload.batches(0, 0, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.recipe.lr, momentum=0.9)
    losses = losses_of(workload, model, optimizer, [batch] * 20, workload.recipe.norm_clip or 400.0)
    assert all(map(math.isfinite, losses)) and min(losses[-3:]) < 0.8 * losses[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_workers_train_the_papers_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = (
        "train speech --preset lstman4 --data synth-an4:12 --batch-size 2 --workers 2 --warmup-steps 1 --max-steps 3"
    )
    assert main([*command.split(), "--runs", str(tmp_path), "--name", "run"]) == 0
    steps = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [step["reduce"]["phase"] for step in steps] == ["dense", "sparse", "sparse"]
    assert all(math.isfinite(step["loss"]) for step in steps) and steps[0]["reduce"]["numel"] == 27_569_568


@pytest.mark.slow
@needs_an4
def test_real_an4_is_read_completely() -> None:
    corpus = SpeechWorkload(SpeechConfig(data=str(Path(OKTOPK_DATA) / "an4")), seed=0)
    assert (len(corpus._train), len(corpus._validation)) == (948, 130) and corpus.notices == ()
    assert corpus.steps_per_epoch(8) == 948 // (8 * corpus.recipe.batch_size)


@pytest.mark.slow
@needs_an4
def test_the_original_files_of_an4_are_read_like_their_flac_copies() -> None:
    original = find_corpus(str(Path(OKTOPK_DATA) / "an4_sphere"))
    copies = {entry.path.stem: entry for entry in find_corpus(str(Path(OKTOPK_DATA) / "an4")).train}
    from oktopk.workloads.speech.audio import read_audio

    for entry in original.train:
        assert entry.text == copies[entry.path.stem].text
        assert torch.equal(read_audio(entry.path), read_audio(copies[entry.path.stem].path))
