"""dMel bins against recorded values, the rule written out, and tml-renderers' own."""

import base64
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from suzuri.processing.audio import (
    audio_bins,
    bin_centers,
    dmel_bins,
    log_mel,
    mel_filters,
    num_audio_tokens,
)
from tests.processing.clips import hiss, pcm, tone, wav

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "media" / "media.safetensors")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_m16_log_mel_and_bins_equal_the_released_preprocessing(index: int) -> None:
    waveform = GOLDEN[f"audio.{index}.waveform"]
    expected = GOLDEN[f"audio.{index}.log_mel"]
    assert log_mel(waveform).shape == expected.shape
    np.testing.assert_allclose(log_mel(waveform), expected, rtol=0, atol=1e-4)
    assert np.array_equal(dmel_bins(waveform), GOLDEN[f"audio.{index}.bins"])
    assert np.array_equal(audio_bins(waveform), GOLDEN[f"audio.{index}.bins"])


def test_m16_filters_and_levels_equal_the_released_preprocessing() -> None:
    assert np.array_equal(mel_filters(), GOLDEN["audio.mel_filters"])
    assert np.array_equal(bin_centers(), GOLDEN["audio.bin_centers"])


def test_log_mel_of_one_frame_by_the_written_rule() -> None:
    """The second frame of a clip, with a plain Fourier sum instead of an FFT."""
    waveform = hiss(2400, seed=3)
    window = np.array([0.5 - 0.5 * math.cos(2 * math.pi * n / 1600) for n in range(1600)])
    angles = -2j * np.pi * np.outer(np.arange(801), np.arange(1600)) / 1600
    spectrum = np.exp(angles) @ (waveform[:1600] * window)
    power = np.maximum(np.abs(spectrum) ** 2, 1e-10)
    expected = np.log10(np.maximum(np.sqrt(power) @ mel_filters().T, 1e-10))
    np.testing.assert_allclose(log_mel(waveform)[1], expected, rtol=0, atol=1e-6)


def test_bins_are_the_nearest_levels_and_ties_go_down() -> None:
    waveform = np.concatenate([hiss(8000) * gain for gain in (1e-4, 1e-2, 1, 30)])
    values = log_mel(waveform).astype(np.float64)
    centers = bin_centers(5, -4.0, 1.0).astype(np.float64)
    expected = np.abs(values[..., None] - centers).argmin(axis=-1)
    bins = dmel_bins(waveform, mel_vocab_size=5, dmel_min=-4.0, dmel_max=1.0)
    assert bins.dtype == np.uint8
    assert set(np.unique(bins)) == {0, 1, 2, 3, 4}
    assert np.array_equal(bins, expected)
    tie = float(log_mel(np.zeros(800))[0, 0])  # halfway between two levels
    assert dmel_bins(np.zeros(800), mel_vocab_size=2, dmel_min=tie - 1, dmel_max=tie + 1)[0, 0] == 0


@pytest.mark.parametrize("num_samples", [1, 799, 800, 801, 1600, 5003, 256 * 800, 300 * 800 + 7])
def test_one_frame_for_every_50_ms_begun(num_samples: int) -> None:
    expected = math.ceil(num_samples / 800)
    waveform = hiss(num_samples)
    assert num_audio_tokens(num_samples) == expected
    assert num_audio_tokens(waveform) == expected
    assert audio_bins(waveform).shape == (expected, 80)


def test_a_frame_depends_on_its_own_samples_only() -> None:
    """So block boundaries inside the computation cannot show."""
    waveform = hiss(600 * 800, seed=5)
    whole = log_mel(waveform)
    for frame in (1, 255, 256, 257, 512, 599):
        alone = log_mel(waveform[(frame - 1) * 800 : (frame + 1) * 800])
        np.testing.assert_allclose(whole[frame], alone[1], rtol=0, atol=1e-6)


def test_m16_silence_is_level_two_and_never_nan() -> None:
    """-6 on the log scale: the released floor of the spectrum, so neither 0 nor minus infinity."""
    values = log_mel(np.zeros(1700))
    np.testing.assert_allclose(values, -6.0, atol=0.02)
    assert np.array_equal(audio_bins(np.zeros(1700)), np.full((3, 80), 2))


def test_m16_a_full_scale_tone_peaks_in_its_own_band() -> None:
    """1 kHz, full scale: amplitude 400 (half the window's sum), spread over Hann's three lines."""
    bands = log_mel(tone(1000, 0.5))[4]
    weights = mel_filters()[:, 99:102] @ np.array([200.0, 400.0, 200.0])
    assert bands.argmax() == weights.argmax()
    np.testing.assert_allclose(bands.max(), np.log10(weights.max()), atol=1e-3)


def test_other_settings_of_the_tower() -> None:
    bins = audio_bins(hiss(1600), n_mel_bins=24, mel_vocab_size=256, dmel_min=-3.0, dmel_max=3.0)
    values = log_mel(hiss(1600).astype(np.float32), n_mel_bins=24)
    assert np.array_equal(bins, np.rint((values + 3) * 255 / 6))
    for size, low in ((257, -7.0), (1, -7.0), (16, 2.0), (16, -math.inf)):
        with pytest.raises(ValueError, match="need 2 to 256 levels"):
            audio_bins(hiss(1600), mel_vocab_size=size, dmel_min=low)
    with pytest.raises(ValueError, match="at least one mel bin"):
        audio_bins(hiss(1600), n_mel_bins=0)
    with pytest.raises(ValueError, match="cannot have -1 samples"):
        num_audio_tokens(-1)


def renderers_bins(data: bytes, num_samples: int) -> NDArray[np.uint8]:
    from tml_renderers import chat, tokenizers, v0

    location = "data:audio/wav;base64," + base64.b64encode(data).decode()
    pointer = chat.AudioPointer(location, chat.AudioFormat.Wav, num_samples, 16000)
    message = chat.Message(pointer, chat.Author(chat.AuthorKind.User))
    spans, _ = v0.Renderer(tokenizers.O200kBaseChatTokenizer()).render_for_completion([message])
    return next(s.span for s in spans if isinstance(s.span, chat.DmelTokenSpan)).dmel.numpy()


SOUNDS = {
    "silence": np.zeros(24001),
    "full-scale sine": tone(440, 1.5),
    "impulse": np.eye(1, 24001, 5000)[0],
    "clipping square": np.sign(tone(300, 1.5)),
    "hiss": hiss(24001),
    "quiet hiss": hiss(24001) * 2e-3,
    "one step of one sample": np.eye(1, 5003, 7)[0] / 32767,
    "longer than a block": hiss(290 * 800 + 1),
}


@pytest.mark.parametrize("name", SOUNDS)
def test_m16_bins_equal_tml_renderers(name: str) -> None:
    samples = pcm(SOUNDS[name])
    both = {"mono": samples, "stereo": np.stack([samples, samples // 3], axis=1)}
    for channels, stereo in both.items():
        data = wav(stereo)
        expected = renderers_bins(data, len(samples))
        assert np.array_equal(audio_bins(data), expected), channels


def test_m16_where_a_sweep_differs_from_tml_renderers_their_float32_spectrum_is_the_reason() -> (
    None
):
    """Between a loud tone's lines theirs holds rounding noise, which may cross a limit."""
    seconds = np.arange(24001) / 16000
    samples = pcm(np.sin(2 * np.pi * (50 * seconds + 2500 * seconds**2)))
    theirs = renderers_bins(wav(samples), len(samples))
    differs = audio_bins(samples) != theirs
    assert differs.mean() < 0.005
    centers = bin_centers().astype(np.float64)
    limits = (centers[1:] + centers[:-1]) / 2
    values = log_mel(samples / 32768)[differs]
    assert np.abs(values[:, None] - limits).min(axis=1).max(initial=0) < 0.01


def test_quiet_clips_are_raised_and_silence_and_loud_clips_are_not() -> None:
    quiet = hiss(8000) * 0.01
    rms = math.sqrt(np.square(quiet).mean())
    assert rms < 0.0011
    assert np.array_equal(dmel_bins(quiet), dmel_bins(quiet * (0.01 / rms), rms_floor=0))
    assert not np.array_equal(dmel_bins(quiet), dmel_bins(quiet, rms_floor=0))
    assert np.array_equal(dmel_bins(hiss(8000)), dmel_bins(hiss(8000), rms_floor=0))
    assert np.array_equal(audio_bins(quiet, rms_floor=0), dmel_bins(quiet, rms_floor=0))
