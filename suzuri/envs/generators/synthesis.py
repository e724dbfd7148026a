"""Short sounds from formulas: tones, beeps, glides, and vowel-like syllables that stand for digits.

All at 16 kHz, with random level, length, voice and a little noise; as data of a 16-bit WAV file.
"""

import base64
import io
import random
import wave
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RATE = 16000
Wave = NDArray[np.float64]

PITCHES = {"low": (140.0, 320.0), "middle": (520.0, 950.0), "high": (1600.0, 3400.0)}
"""Hertz of what is called so; the gaps between belong to nobody."""

# First and second formant in Hz of eight vowels (averages of many speakers, rounded).
_VOWELS = {
    "i": (300, 2300),
    "e": (480, 2000),
    "a": (750, 1250),
    "o": (500, 900),
    "u": (320, 800),
    "@": (500, 1500),
    "I": (400, 1950),
    "A": (650, 1700),
}
# A digit is one to three pieces: vowels glide into each other, "s" is a hiss, "f" a soft one, "." a
# gap, "n" a hum.
_DIGITS = ("sI.o", "uAn", ".u", "fri", "fo", "fai", "sI.s", "sA.@n", "ei.", "nain")
_HISSES = {"s": (4200.0, 0.30), "f": (1800.0, 0.08)}


def tone(rng: random.Random, hertz: float, seconds: float) -> Wave:
    """A tone with a few overtones and soft edges."""
    return glide(rng, hertz, hertz, seconds)


def glide(rng: random.Random, start: float, end: float, seconds: float) -> Wave:
    """A tone that moves from one pitch to another, in even steps of the ear."""
    count = int(seconds * RATE)
    hertz = start * (end / start) ** np.linspace(0.0, 1.0, count)
    phase = 2 * np.pi * np.cumsum(hertz) / RATE
    sound = np.sin(phase)
    for overtone in (2, 3):
        sound = sound + rng.uniform(0, 0.3) * np.sin(overtone * phase)
    return _soft_edges(sound)


def silence(seconds: float) -> Wave:
    return np.zeros(int(seconds * RATE))


def digit(rng: random.Random, value: int, voice: float) -> Wave:
    """The syllables of a digit in a voice of so many Hz."""
    pieces: list[Wave] = []
    vowels = ""
    for letter in f"{_DIGITS[value]} ":
        if letter in _VOWELS:
            vowels += letter
            continue
        if vowels:
            pieces.append(_syllable(rng, vowels, voice))
            vowels = ""
        length = rng.uniform(0.05, 0.08)
        if letter == ".":
            pieces.append(silence(length))
        elif letter in _HISSES:
            pieces.append(_hiss(rng, *_HISSES[letter], length * 1.4))
        elif letter in "nr":
            hum = (250.0, 1100.0) if letter == "n" else (350.0, 1300.0)
            pieces.append(0.5 * _voiced(rng, [hum, hum], voice, length))
    return np.concatenate(pieces)


def wav_data(rng: random.Random, sound: Wave) -> str:
    """Base64 of a WAV file, at a random level over a little noise."""
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(sound))
    peak = max(float(np.abs(sound).max()), 1e-9)
    loud = sound / peak * rng.uniform(0.2, 0.8) + noise * rng.uniform(0.0, 0.003)
    samples = np.clip(np.rint(loud * 32767), -32768, 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as clip:
        clip.setnchannels(1)
        clip.setsampwidth(2)
        clip.setframerate(RATE)
        clip.writeframes(samples.tobytes())
    return base64.b64encode(file.getvalue()).decode()


def _syllable(rng: random.Random, vowels: str, voice: float) -> Wave:
    formants = [_VOWELS[vowel] for vowel in vowels]
    return _voiced(rng, formants, voice, rng.uniform(0.12, 0.18) + 0.04 * len(vowels))


def _voiced(
    rng: random.Random, formants: Sequence[tuple[float, float]], voice: float, seconds: float
) -> Wave:
    """Overtones of a voice, strong near the formants, which glide from one vowel to the next."""
    count = int(seconds * RATE)
    at = np.linspace(0, len(formants) - 1, count)
    places = np.arange(len(formants))
    first, second = (np.interp(at, places, [pair[i] for pair in formants]) for i in (0, 1))
    hertz = voice * np.linspace(1.0, rng.uniform(0.88, 1.08), count)
    phase = 2 * np.pi * np.cumsum(hertz) / RATE
    sound = np.zeros(count)
    for overtone in range(1, int(3200 / voice) + 1):
        place = overtone * hertz
        level = np.exp(-(((place - first) / 110) ** 2)) + 0.6 * np.exp(
            -(((place - second) / 160) ** 2)
        )
        sound += (level + 0.01) * np.sin(overtone * phase)
    return _soft_edges(sound / (np.abs(sound).max() + 1e-9))


def _hiss(rng: random.Random, above: float, level: float, seconds: float) -> Wave:
    """Noise without what lies below a pitch."""
    count = int(seconds * RATE)
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(count)
    spectrum = np.fft.rfft(noise)
    spectrum[np.fft.rfftfreq(count, 1 / RATE) < above] = 0
    return _soft_edges(level * np.fft.irfft(spectrum, count))


def _soft_edges(sound: Wave) -> Wave:
    edge = min(len(sound) // 4, int(0.012 * RATE))
    ramp = np.linspace(0.0, 1.0, edge)
    sound[:edge] *= ramp
    sound[len(sound) - edge :] *= ramp[::-1]
    return sound
