"""From a clip in any accepted form to a mono 16 kHz waveform, or a `MediaError` in words.
The decoders: `audio_decoders.py`.

- 16-bit PCM WAV at 16 kHz is read with the standard library; other WAV, FLAC, MP3, Ogg, AIFF, AU
  and CAF with soundfile, other rates are resampled with soxr (both in the `media` extra); M4A,
  WebM and AAC with PyAV where it is installed.
- Channels are averaged. Resampling to n samples means ceil(frames * 16000 / rate) of them, always.
- The length comes from the header and equals the decoded length; only PyAV's containers, which do
  not store it, are decoded to be counted. Streams written before their length was known (a WAV
  that promises more than it holds, an MP3 without a Xing frame) are as long as what they hold.
- Refused: no samples at all, NaN or infinite samples, a compressed file cut short.
"""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suzuri.processing.audio_decoders import SAMPLE_RATE, Clip, mono, open_clip, package
from suzuri.processing.errors import MediaError
from suzuri.processing.sources import MediaBytes, open_source

AudioSource = MediaBytes | NDArray[Any] | Sequence[float]

# Ten minutes are 12,000 tokens.
MAX_SECONDS = 600.0

_MIN_RATE, _MAX_RATE = 1000, 768_000
_MAX_CHANNELS = 32
_FULL_SCALE = {"int16": 1 << 15, "int32": 1 << 31}


def load_waveform(
    source: AudioSource, *, sample_rate: int | None = None, max_seconds: float = MAX_SECONDS
) -> NDArray[np.float32]:
    """Mono samples at 16 kHz, full scale 1. `sample_rate` is that of samples passed as such:
    floats, or int16, int32 or uint8 PCM, shaped [samples] or [samples, channels]."""
    with _opened(source, sample_rate, max_seconds) as clip:
        samples = clip.read()
    bad = np.flatnonzero(~np.isfinite(samples))
    if bad.size:
        raise MediaError(
            f"the clip holds {bad.size} NaN or infinite samples, the first at "
            f"{bad[0] / clip.rate:.3f} s; repair it and send it again"
        )
    return _resample(samples, clip.rate)


def count_samples(
    source: AudioSource, *, sample_rate: int | None = None, max_seconds: float = MAX_SECONDS
) -> int:
    """The length of `load_waveform`, from the header."""
    with _opened(source, sample_rate, max_seconds) as clip:
        return _resampled_length(clip.num_frames, clip.rate)


@contextmanager
def _opened(source: AudioSource, sample_rate: int | None, max_seconds: float) -> Generator[Clip]:
    if not isinstance(source, str | os.PathLike | bytes | bytearray):
        clip = _from_samples(source, SAMPLE_RATE if sample_rate is None else sample_rate)
        _check_length(clip, max_seconds)
        yield clip
        return
    if sample_rate is not None:
        raise ValueError("sample_rate is for samples; a file says its own rate, so leave it out")
    with open_source(source, "clip") as file:
        clip = open_clip(file, max_seconds)
        _check_length(clip, max_seconds)
        yield clip


def _check_length(clip: Clip, max_seconds: float) -> None:
    if not _MIN_RATE <= clip.rate <= _MAX_RATE:
        raise MediaError(
            f"the clip claims {clip.rate} Hz; rates of {_MIN_RATE} to {_MAX_RATE} work"
        )
    if clip.num_frames < 1:
        raise MediaError("the clip is empty: it holds no samples")
    seconds = clip.num_frames / clip.rate
    if seconds > max_seconds:
        raise MediaError(
            f"the clip lasts {seconds:.1f} s, the limit is {max_seconds:g} s; cut it into parts"
        )


def _from_samples(source: NDArray[Any] | Sequence[float], rate: int) -> Clip:
    try:
        samples = np.asarray(source)
    except ValueError as error:
        raise MediaError(f"these are not samples of one clip: {error}") from error
    if samples.ndim not in (1, 2) or (samples.ndim == 2 and samples.shape[1] > _MAX_CHANNELS):
        raise MediaError(
            f"samples must be shaped [samples] or [samples, channels], got {samples.shape}"
        )
    if samples.size == 0:
        raise MediaError("the clip is empty: it holds no samples")
    if samples.dtype.kind == "f":
        scaled = samples
    elif samples.dtype == np.uint8:
        scaled = samples / 128 - 1
    elif samples.dtype.name in _FULL_SCALE:
        scaled = samples / _FULL_SCALE[samples.dtype.name]
    else:
        raise MediaError(
            f"samples of type {samples.dtype} have no known full scale; pass floats from -1 to 1, "
            "or int16, int32 or uint8 PCM"
        )
    waveform = mono(scaled.reshape(len(scaled), -1))
    return Clip(num_frames=len(waveform), rate=rate, read=lambda: waveform)


def _resampled_length(num_frames: int, rate: int) -> int:
    return -(-num_frames * SAMPLE_RATE // rate)


def _resample(samples: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
    if rate == SAMPLE_RATE:
        return samples
    soxr = package("soxr", f"a clip at {rate} Hz", "pip install soxr, or send 16 kHz")
    resampled: NDArray[np.float32] = soxr.resample(samples, rate, SAMPLE_RATE, quality="HQ")
    # soxr rounds the length, which may be one sample off the count made from the header.
    out = np.zeros(_resampled_length(len(samples), rate), np.float32)
    length = min(len(out), len(resampled))
    out[:length] = resampled[:length]
    return out
