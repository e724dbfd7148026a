"""Pictures and sounds show what the answers say, measured here in the pixels and samples."""

import base64
import io
import random
import wave
from typing import Any

import numpy as np
import pytest
from PIL import Image

from suzuri.envs.generators import pictures, sounds
from suzuri.envs.generators.drawing import CELL, COLOURS, MAX_TOKENS, SHAPES, draw_scene, png_url
from suzuri.envs.generators.synthesis import PITCHES
from suzuri.envs.task import Task
from suzuri.processing.audio import audio_bins, num_audio_tokens
from suzuri.processing.images import image_patches, num_image_tokens
from suzuri.processing.media import base64_bytes, data_url_bytes


def drawn(make: Any, variant: str, count: int) -> list[Task]:
    return [make(random.Random(seed), 1.0, variant) for seed in range(count)]


def part_of(task: Task, kind: str) -> Any:
    return next(part[kind] for part in task.messages[0]["content"] if part["type"] == kind)


def pixels(task: Task) -> np.ndarray:
    file = io.BytesIO(data_url_bytes(part_of(task, "image_url")["url"]))
    return np.asarray(Image.open(file)).astype(int)


def colours_in(array: np.ndarray) -> set[str]:
    """The named colours that at least 60 pixels come near to."""
    flat = array.reshape(-1, 3)
    found = {name: np.abs(flat - np.array(rgb)).max(1) <= 16 for name, rgb in COLOURS.items()}
    return {name for name, near in found.items() if near.sum() >= 60}


def answer(task: Task) -> str:
    return task.target[0]["content"]


def test_pictures_are_one_to_twelve_tokens():
    counts: set[int] = set()
    for variant in pictures.VARIANTS:
        for task in drawn(pictures.make, variant, 20):
            data = data_url_bytes(part_of(task, "image_url")["url"])
            count = num_image_tokens(data)
            assert len(image_patches(data)) == count
            counts.add(count)
    assert counts == {1, 2, 3, 4, 6, 8, 9, MAX_TOKENS}


def test_colours_are_in_the_picture():
    for task in drawn(pictures.make, "colour", 60):
        assert colours_in(pixels(task)) == {answer(task)}
    for task in drawn(pictures.make, "describe", 60):
        assert colours_in(pixels(task)) == {c for c in COLOURS if f" {c} " in answer(task)}


def test_positions_are_where_the_colour_is():
    for task in drawn(pictures.make, "where", 80):
        words = task.key.split(":")[1].removeprefix("x")
        rows, columns = (int(n) for n in words.split("x"))
        text = next(p["text"] for p in task.messages[0]["content"] if p["type"] == "text").lower()
        colour = next(colour for colour in COLOURS if f"{colour} " in text)
        shapes = task.key.split(":")[2].split(",")
        if sum(shape.startswith(colour) for shape in shapes) > 1:
            continue
        near = np.abs(pixels(task) - np.array(COLOURS[colour])).max(2) <= 16
        y, x = (axis.mean() / CELL for axis in np.nonzero(near))
        down = ["top", "bottom"] if rows == 2 else ["top", "middle", "bottom"]
        across = ["left", "right"] if columns == 2 else ["left", "middle", "right"]
        place = [down[int(y)]] * (rows > 1) + [across[int(x)]] * (columns > 1)
        expected = "middle" if set(place) == {"middle"} else " ".join(place)
        assert answer(task) == expected


def test_shapes_fill_as_much_of_their_box_as_they_should():
    share = {"circle": 0.78, "square": 1.0, "triangle": 0.5, "cross": 0.55}
    for seed in range(60):
        rng = random.Random(seed)
        scene = draw_scene(rng, 1, big=seed % 3 == 0)
        file = io.BytesIO(data_url_bytes(png_url(scene, rng)))
        array = np.asarray(Image.open(file)).astype(int)
        near = np.abs(array - np.array(COLOURS[scene.shapes[0].colour])).max(2) <= 16
        ys, xs = np.nonzero(near)
        box = (np.ptp(ys) + 1) * (np.ptp(xs) + 1)
        assert near.sum() / box == pytest.approx(share[scene.shapes[0].shape], abs=0.1)


def test_counts_and_yes_no_follow_the_scene():
    for task in drawn(pictures.make, "count", 40):
        assert int(answer(task)) == len(task.key.split(":")[2].split(","))
    both = set[str]()
    for task in drawn(pictures.make, "yes_no", 60):
        text = next(p["text"] for p in task.messages[0]["content"] if p["type"] == "text")
        asked = next(f"{c} {s}" for c in COLOURS for s in SHAPES if f"{c} {s}" in text)
        there = any(shape.startswith(asked) for shape in task.key.split(":")[2].split(","))
        assert answer(task) == ("yes" if there else "no")
        both.add(answer(task))
    assert both == {"yes", "no"}


def samples(task: Task) -> np.ndarray:
    clip = part_of(task, "input_audio")
    with wave.open(io.BytesIO(base64.b64decode(clip["data"]))) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (16000, 1, 2)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(float)


def loudest_hertz(sound: np.ndarray) -> float:
    """The lowest strong peak of the spectrum: overtones are weaker than the tone."""
    spectrum = np.abs(np.fft.rfft(sound * np.hanning(len(sound))))
    return float(spectrum.argmax()) * 16000 / len(sound)


def test_clips_are_four_to_a_few_dozen_tokens():
    for variant in sounds.VARIANTS:
        for task in drawn(sounds.make, variant, 6):
            data = base64_bytes(part_of(task, "input_audio")["data"])
            count = num_audio_tokens(data)
            assert len(audio_bins(data)) == count and 2 <= count <= 60


def test_pitches_are_in_their_ranges():
    heard = set[str]()
    for task in drawn(sounds.make, "pitch", 30):
        low, high = PITCHES[answer(task)]
        assert low * 0.98 <= loudest_hertz(samples(task)) <= high * 1.02
        heard.add(answer(task))
    assert heard == set(PITCHES)


def test_beeps_can_be_counted():
    for task in drawn(sounds.make, "beeps", 30):
        loud = np.abs(samples(task))
        level = np.convolve(loud, np.ones(400) / 400, "same") > 0.12 * loud.max()
        assert int(answer(task)) == int((np.diff(level.astype(int)) == 1).sum() + level[0])


def test_directions_and_comparisons():
    for task in drawn(sounds.make, "direction", 30):
        sound = samples(task)
        start, end = loudest_hertz(sound[:2400]), loudest_hertz(sound[-2400:])
        way = "rising" if end > 1.3 * start else "falling" if start > 1.3 * end else "steady"
        assert answer(task) == way
    for task in drawn(sounds.make, "compare", 30):
        sound = samples(task)
        first, second = loudest_hertz(sound[:3200]), loudest_hertz(sound[-3200:])
        assert answer(task) == ("the first" if first > second else "the second")


def test_digits_sound_different_and_alike_in_every_voice():
    """The nearest other clip by spectrum is of the same digit far more often than by chance."""
    clips = drawn(sounds.make, "digit", 80)
    bins = [
        audio_bins(base64_bytes(part_of(t, "input_audio")["data"])).astype(float) for t in clips
    ]
    # Three thirds of time, so that order counts.
    marks = [np.concatenate([part.mean(0) for part in np.array_split(b, 3)]) for b in bins]
    right = 0
    for i, mark in enumerate(marks):
        far = [np.abs(mark - other).sum() if j != i else np.inf for j, other in enumerate(marks)]
        right += answer(clips[i]) == answer(clips[int(np.argmin(far))])
    assert right > 40
