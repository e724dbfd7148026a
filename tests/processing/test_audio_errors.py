"""Everything that is no usable clip: a `MediaError` in words, before decoding if possible."""

import random
import sys
from typing import Any

import numpy as np
import pytest

from suzuri.processing.audio import audio_bins, num_audio_tokens
from suzuri.processing.errors import MediaError, MissingDecoderError
from tests.processing.clips import encoded, hiss, pcm, wav


@pytest.fixture
def no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("soundfile", "soxr", "av"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("no_extra")
@pytest.mark.parametrize(
    ("data", "fix"),
    [
        (wav(pcm(hiss(800)), rate=8000), r"'soundfile' .*pip install soundfile soxr"),
        (encoded(hiss(800), 16000, "FLAC"), r"'soundfile' .*pip install soundfile soxr"),
        (encoded(hiss(800), 16000, "MP3"), r"'soundfile' .*pip install soundfile soxr"),
        (b"\0\0\0\x1cftypM4A \0\0\0\0", "M4A or MP4 needs the package 'av' .*pip install av"),
        (b"\x1aE\xdf\xa3\x9fB\x86\x81", "WebM or Matroska needs the package 'av'"),
        (b"\xff\xf1\x4c\x80\x27\x7f\xfc\xde", "AAC needs the package 'av'"),
    ],
)
def test_m21_a_missing_package_is_named_with_its_fix(data: bytes, fix: str) -> None:
    for function in (audio_bins, num_audio_tokens):
        with pytest.raises(MissingDecoderError, match=fix):
            function(data)


@pytest.mark.usefixtures("no_extra")
def test_m21_resampling_names_its_package() -> None:
    assert num_audio_tokens(hiss(4410), sample_rate=44100) == 2
    with pytest.raises(MissingDecoderError, match=r"44100 Hz .*'soxr' .*pip install soxr"):
        audio_bins(hiss(4410), sample_rate=44100)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused(bad: float) -> None:
    samples = hiss(9000)
    samples[8000] = bad
    for source in (samples, samples.tolist(), encoded(samples, 16000, "WAV", "FLOAT")):
        with pytest.raises(MediaError, match=r"1 NaN or infinite samples, the first at 0\.500 s"):
            audio_bins(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([], "the clip is empty: it holds no samples"),
        (np.zeros((0, 2)), "the clip is empty"),
        (wav(np.zeros(0, np.int16)), "the clip is empty: it holds no samples"),
        (b"", "the clip is empty .0 bytes."),
        (b"just words", "this is text .*not a clip"),
        (b"\x89PNG\r\n\x1a\n\0\0", "unknown audio format"),
        (b"fLaC" + bytes(80), "the clip cannot be read"),
        (b"RIFF\x10\0\0\0WAVEjunk", "the clip cannot be read"),
        (b"\xff\xfb", "the clip cannot be read"),
        (np.zeros((2, 16000)), r"must be shaped .* got \(2, 16000\)"),
        (np.zeros((2, 2, 2)), "must be shaped"),
        (np.float64(1), r"must be shaped .* got \(\)"),
        ([0, 1200, -3000], "samples of type int64 have no known full scale"),
        (["a", "b"], "have no known full scale"),
        ([[1.0], [1.0, 2.0]], "not samples of one clip"),
        ("https://example.org/clip.wav", "is a URL, not a file"),
        ("none.wav", "cannot read the clip 'none.wav'"),
    ],
)
def test_what_is_no_clip_is_named(source: Any, words: str) -> None:
    for function in (audio_bins, num_audio_tokens):
        with pytest.raises(MediaError, match=words):
            function(source)


def test_rates_are_checked() -> None:
    for rate in (0, -16000, 999, 768_001):
        with pytest.raises(MediaError, match=f"claims {rate} Hz; rates of 1000 to 768000 work"):
            num_audio_tokens(hiss(10), sample_rate=rate)
    with pytest.raises(ValueError, match="a file says its own rate"):
        audio_bins(wav(pcm(hiss(800))), sample_rate=16000)


def test_m18_a_clip_over_the_limit_is_refused_from_its_header_with_both_numbers() -> None:
    """The FLAC is a few kB; its eleven minutes are not decoded, nor need they be there."""
    long = encoded(np.zeros(661 * 8000), 8000, "FLAC")
    for source in (long, long[:200]):
        with pytest.raises(MediaError, match=r"lasts 661\.0 s, the limit is 600 s"):
            audio_bins(source)
    with pytest.raises(MediaError, match=r"lasts 2\.0 s, the limit is 1\.5 s"):
        num_audio_tokens(wav(pcm(hiss(32000))), max_seconds=1.5)
    assert num_audio_tokens(wav(pcm(hiss(24000))), max_seconds=1.5) == 30


@pytest.mark.parametrize("container", ["FLAC", "MP3"])
def test_a_compressed_clip_cut_short_is_refused(container: str) -> None:
    data = encoded(hiss(30011), 16000, container)
    with pytest.raises(MediaError, match=r"damaged|cut short"):
        audio_bins(data[: len(data) // 2])


def test_m01_a_seek_before_the_start_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """libsndfile does that for an AIFF without a sound chunk, and Python errors cannot pass it."""
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    data = encoded(hiss(20), 8000, "AIFF").replace(b"SSND", b"XXND")
    with pytest.raises(MediaError, match="cannot be read"):
        audio_bins(data)
    assert printed == []


def test_m01_damaged_clips_are_read_or_refused_but_nothing_else() -> None:
    picker = random.Random(11)
    samples = hiss(3001)
    seeds = [wav(pcm(samples))]
    seeds += [encoded(samples, 16000, name) for name in ("FLAC", "OGG", "AIFF", "AU", "CAF")]
    seeds.append(encoded(samples, 8000, "WAV", "FLOAT"))
    num_read = num_refused = 0
    for _ in range(600):
        data = bytearray(picker.choice(seeds))
        for _ in range(picker.choice((1, 1, 4))):
            data[picker.randrange(min(len(data), picker.choice((48, 300))))] = picker.randrange(256)
        try:
            count = num_audio_tokens(bytes(data))
            assert len(audio_bins(bytes(data))) == count
            num_read += 1
        except MediaError:
            num_refused += 1
    assert num_read > 50
    assert num_refused > 50
