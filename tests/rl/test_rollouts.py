"""Saved batches: the same records come back, and what is no whole file is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suzuri.envs.env import Trajectory, Turn
from suzuri.rl.rollouts import Attempted, Rollouts, load_rollouts, path_of, save_rollouts
from suzuri.types import Answer, MediaInput, Prompt
from tests.rl.trajectories import attempt, turn

NAN = float("nan")


def rollouts() -> Rollouts:
    """All kinds of values that a record may have."""
    picture = MediaInput(kind="image", index=1, inputs=np.arange(24, dtype=np.uint8).reshape(2, 12))
    prompt = Prompt(tokens=[5, 200_000, 7], media=(picture,))
    answer = Answer(
        tokens=[1, 2],
        logprobs=[-0.1, float(np.float32(-1 / 3))],
        versions=[3, 4],
        finish="error",
        error="no token",
        routing=np.array([[[0, 3]], [[1, 2]]], np.uint8),
    )
    seen = Turn(prompt=prompt, answer=answer, scores={"teacher": np.array([-2, -3], np.float32)})
    shared = [
        Trajectory(
            turns=[seen], reward=None, status="failed", error="x", metrics={"a": float("nan")}
        )
        for _ in range(2)
    ]
    empty = attempt(0.0, turn([1], []))
    groups = [
        Attempted(place=7, name="one", trajectories=[*shared, empty]),
        Attempted(place=8, name="", trajectories=[attempt(1.5)]),
    ]
    return Rollouts(step=3, version=2, groups=groups)


def plain(value: Any) -> Any:
    """Comparable, with types, bits of floats and dtypes of arrays."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return type(value).__name__, [plain(getattr(value, one.name)) for one in fields]
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return repr(value)


def test_what_is_saved_comes_back_to_the_bit(tmp_path: Path) -> None:
    whole = rollouts()
    save_rollouts(tmp_path, whole)
    assert [file.name for file in tmp_path.iterdir()] == ["step-000003.safetensors"]
    assert plain(load_rollouts(tmp_path, 3)) == plain(whole)
    # Written once, though two attempts were shown it.
    picture = whole.groups[0].trajectories[0].turns[0].prompt.media[0].inputs
    assert path_of(tmp_path, 3).read_bytes().count(picture.tobytes()) == 1


def test_what_is_no_whole_file_is_refused(tmp_path: Path) -> None:
    save_rollouts(tmp_path, rollouts())
    path = path_of(tmp_path, 3)
    whole = path.read_bytes()
    with pytest.raises(ValueError, match=r"step-000004.*is not there.*save_rollouts"):
        load_rollouts(tmp_path, 4)
    path_of(tmp_path, 4).write_bytes(whole)
    with pytest.raises(ValueError, match="something else than the rollouts of step 4"):
        load_rollouts(tmp_path, 4)
    for broken in (whole[:-5], whole[:100], b"", whole.replace(b"Trajectory", b"Trajectorx")):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="cannot be read as rollouts"):
            load_rollouts(tmp_path, 3)


def test_a_file_names_no_class_but_the_records(tmp_path: Path) -> None:
    """It is read without running anything that it names."""
    save_rollouts(tmp_path, rollouts())
    path = path_of(tmp_path, 3)
    path.write_bytes(path.read_bytes().replace(b'\\"Attempted\\"', b'\\"LocalRun1\\"'))
    with pytest.raises(ValueError, match="cannot be read as rollouts: 'LocalRun1'"):
        load_rollouts(tmp_path, 3)


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path: Path) -> None:
    save_rollouts(tmp_path, rollouts())
    odd: Any = attempt(1.0, metrics={"a": object()})
    bad = Rollouts(step=3, version=0, groups=[Attempted(place=0, name="", trajectories=[odd])])
    with pytest.raises(TypeError, match="object cannot be saved"):
        save_rollouts(tmp_path, bad)
    assert load_rollouts(tmp_path, 3).version == 2
