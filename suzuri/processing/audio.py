"""A clip to the dMel bins the audio tower reads: one frame, and one token, every 50 ms.

The waveform is mono, float, 16 kHz; a quiet clip is first raised to a root mean square of 0.01.
A frame is 100 ms long (so frames overlap by half), and its log mel spectrum is rounded to a few
levels. Reading clips from files: `audio_files.py`.

tml-renderers computes the same bins, but only inside rendering, from files it opens itself, with
librosa for other sample rates, and an empty clip ends in a panic; it also loads torch. Here numpy
is enough, and any waveform will do. The tests hold both against each other.
"""

import math

import numpy as np
from numpy.typing import NDArray

from suzuri.processing.audio_decoders import SAMPLE_RATE
from suzuri.processing.audio_files import (
    MAX_SECONDS,
    AudioSource,
    count_samples,
    load_waveform,
)

NUM_MEL_BINS = 80
MEL_VOCAB_SIZE = 16
DMEL_MIN = -7.0
DMEL_MAX = 2.0
RMS_FLOOR = 0.01

_HOP = 800
_WINDOW = 1600
_MAX_HERTZ = 8000.0
_FLOOR = 1e-10
# One block of frames at a time: memory stays flat, and every block has the same shape, so that a
# frame's numbers do not depend on the length of the clip around it.
_BLOCK = 256


def audio_bins(
    source: AudioSource,
    *,
    sample_rate: int | None = None,
    n_mel_bins: int = NUM_MEL_BINS,
    mel_vocab_size: int = MEL_VOCAB_SIZE,
    dmel_min: float = DMEL_MIN,
    dmel_max: float = DMEL_MAX,
    rms_floor: float = RMS_FLOOR,
    max_seconds: float = MAX_SECONDS,
) -> NDArray[np.uint8]:
    """dMel bins [num_tokens, n_mel_bins] of a file, its bytes, or samples (numpy or a list).

    `sample_rate` says how fast samples were taken (16 kHz if left out); a file says so itself.
    """
    waveform = load_waveform(source, sample_rate=sample_rate, max_seconds=max_seconds)
    return dmel_bins(
        waveform,
        n_mel_bins=n_mel_bins,
        mel_vocab_size=mel_vocab_size,
        dmel_min=dmel_min,
        dmel_max=dmel_max,
        rms_floor=rms_floor,
    )


def num_audio_tokens(
    source: AudioSource | int, *, sample_rate: int | None = None, max_seconds: float = MAX_SECONDS
) -> int:
    """The length of `audio_bins`, from a number of 16 kHz samples or from a file's header."""
    if isinstance(source, int):
        if source < 0:
            raise ValueError(f"a clip cannot have {source} samples")
        return -(-source // _HOP)
    count = count_samples(source, sample_rate=sample_rate, max_seconds=max_seconds)
    return -(-count // _HOP)


def dmel_bins(
    waveform: NDArray[np.floating],
    *,
    n_mel_bins: int = NUM_MEL_BINS,
    mel_vocab_size: int = MEL_VOCAB_SIZE,
    dmel_min: float = DMEL_MIN,
    dmel_max: float = DMEL_MAX,
    rms_floor: float = RMS_FLOOR,
) -> NDArray[np.uint8]:
    """[frames, n_mel_bins]: the index of the level nearest to each log mel value, the lower one on
    a tie. A clip with a root mean square below `rms_floor` is raised to it (0: never); digital
    silence stays what it is: -6 on this scale, so level 2 with the released settings, not 0."""
    centers = bin_centers(mel_vocab_size, dmel_min, dmel_max).astype(np.float64)
    limits = (centers[1:] + centers[:-1]) / 2
    rms = math.sqrt(np.square(waveform, dtype=np.float64).mean()) if len(waveform) else 0.0
    if 0 < rms < rms_floor:
        waveform = waveform * (rms_floor / rms)
    return np.searchsorted(limits, log_mel(waveform, n_mel_bins=n_mel_bins)).astype(np.uint8)


def bin_centers(
    mel_vocab_size: int = MEL_VOCAB_SIZE, dmel_min: float = DMEL_MIN, dmel_max: float = DMEL_MAX
) -> NDArray[np.float32]:
    if not (2 <= mel_vocab_size <= 256 and -math.inf < dmel_min < dmel_max < math.inf):
        raise ValueError(
            f"need 2 to 256 levels between a lower and an upper limit, got {mel_vocab_size} "
            f"between {dmel_min} and {dmel_max}"
        )
    return np.linspace(dmel_min, dmel_max, mel_vocab_size).astype(np.float32)


def log_mel(
    waveform: NDArray[np.floating], *, n_mel_bins: int = NUM_MEL_BINS
) -> NDArray[np.float32]:
    """[frames, n_mel_bins]: log10 of the mel-weighted amplitude spectrum, frames = ceil(n / 800).

    Frame i covers samples 800 * (i - 1) to 800 * (i + 1), with silence outside the clip. Computed
    in float64, so that rounding cannot move a value across a level.
    """
    if waveform.ndim != 1:
        raise ValueError(f"a waveform has one axis, got shape {waveform.shape}")
    filters = mel_filters(n_mel_bins).astype(np.float64).T
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)
    num_frames = num_audio_tokens(len(waveform))
    out = np.empty((num_frames, n_mel_bins), np.float32)
    for first in range(0, num_frames, _BLOCK):
        samples = np.zeros((_BLOCK + 1) * _HOP)
        begin = (first - 1) * _HOP
        piece = waveform[max(begin, 0) : begin + len(samples)]
        samples[max(-begin, 0) :][: len(piece)] = piece
        frames = np.lib.stride_tricks.sliding_window_view(samples, _WINDOW)[::_HOP]
        spectrum = np.fft.rfft(frames * window)
        power = spectrum.real**2 + spectrum.imag**2
        mel = np.sqrt(np.maximum(power, _FLOOR)) @ filters
        block = np.log10(np.maximum(mel, _FLOOR))
        out[first : first + _BLOCK] = block[: num_frames - first]
    return out


def mel_filters(n_mel_bins: int = NUM_MEL_BINS) -> NDArray[np.float32]:
    """[n_mel_bins, 801]: triangles of equal area, evenly spaced on Slaney's mel scale, 0..8 kHz."""
    if n_mel_bins < 1:
        raise ValueError(f"need at least one mel bin, got {n_mel_bins}")
    mels = np.linspace(0, _hertz_to_mel(_MAX_HERTZ), n_mel_bins + 2)
    edges = np.array([_mel_to_hertz(mel) for mel in mels])
    hertz = np.linspace(0, SAMPLE_RATE / 2, _WINDOW // 2 + 1)
    lower, peak, upper = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising = (hertz - lower) / (peak - lower)
    falling = (upper - hertz) / (upper - peak)
    triangles = np.maximum(0, np.minimum(rising, falling))
    return (triangles * 2 / (upper - lower)).astype(np.float32)


# Slaney's Auditory Toolbox: linear up to 1 kHz, then 27 steps to every factor of 6.4.
_HERTZ_PER_MEL = 200 / 3
_KNEE_HERTZ = 1000.0
_KNEE_MEL = _KNEE_HERTZ / _HERTZ_PER_MEL
_LOG_STEP = math.log(6.4) / 27


def _hertz_to_mel(hertz: float) -> float:
    if hertz < _KNEE_HERTZ:
        return hertz / _HERTZ_PER_MEL
    return _KNEE_MEL + math.log(hertz / _KNEE_HERTZ) / _LOG_STEP


def _mel_to_hertz(mel: float) -> float:
    if mel < _KNEE_MEL:
        return mel * _HERTZ_PER_MEL
    return _KNEE_HERTZ * math.exp((mel - _KNEE_MEL) * _LOG_STEP)
