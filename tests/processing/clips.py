"""Clips for the tests: encoded with the standard library or soundfile."""

import io
import wave

import numpy as np
from numpy.typing import NDArray


def wav(samples: NDArray[np.int16], rate: int = 16000) -> bytes:
    """16-bit PCM; [samples] or [samples, channels]."""
    file = io.BytesIO()
    with wave.open(file, "wb") as clip:
        clip.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        clip.setsampwidth(2)
        clip.setframerate(rate)
        clip.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def encoded(
    samples: NDArray[np.float64], rate: int, container: str, subtype: str | None = None
) -> bytes:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=container, subtype=subtype)
    return file.getvalue()


def pcm(samples: NDArray[np.float64]) -> NDArray[np.int16]:
    return np.clip(np.rint(samples * 32767), -32768, 32767).astype(np.int16)


def tone(hertz: float, seconds: float, rate: int = 16000) -> NDArray[np.float64]:
    return np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)


def hiss(num_samples: int, seed: int = 0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(size=num_samples) * 0.1
