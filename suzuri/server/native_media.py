"""Pictures and clips that come as arrays, checked so that a tower can read them."""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from suzuri.engine.messages import MediaInput
from suzuri.model.config import ModelConfig
from suzuri.processing.errors import MediaError
from suzuri.processing.media import base64_bytes
from suzuri.server.errors import invalid
from suzuri.server.native_schema import GenerateMedia

_CHANNELS = 3


def media_inputs(
    given: Sequence[GenerateMedia], prompt: Sequence[int], config: ModelConfig
) -> list[MediaInput]:
    """For the engine. Raises ApiError 400 for what its tower could not read, or what does not stand
    where the prompt has tokens for it."""
    found: list[MediaInput] = []
    end = 0
    for place, item in enumerate(given):
        where = f"media[{place}]"
        dtype, rest, slot = _expected(item.kind, config, where)
        if item.dtype != dtype or item.shape[1:] != rest or not item.shape or item.shape[0] < 1:
            raise invalid(
                f"{where}: {item.dtype} {item.shape}: must be {dtype} {['N', *rest]}", "media"
            )
        count = item.shape[0]
        if item.index < end or item.index + count > len(prompt):
            raise invalid(
                f"{where}.index = {item.index}: {count} tokens from there must be in the prompt, "
                "after those of the item before",
                "media",
            )
        end = item.index + count
        if any(prompt[i] != slot for i in range(item.index, end)):
            raise invalid(f"{where}: not all of its {count} tokens have the id {slot}", "media")
        data = _data(item, where)
        _check_values(data, item, config, where)
        found.append(
            MediaInput(
                index=item.index,
                count=count,
                kind=item.kind,
                digest=_digest(item, data),
                dtype=item.dtype,
                shape=tuple(item.shape),
                data=data,
            )
        )
    return found


def _expected(kind: str, config: ModelConfig, where: str) -> tuple[str, list[int], int]:
    """Dtype, shape without the first dim, and the id at its places."""
    vision, audio = config.vision, config.audio
    if kind == "image" and vision is not None:
        shape = [vision.temporal_patch_size, vision.patch_size, vision.patch_size, _CHANNELS]
        return "float32", shape, config.image_token_id
    if kind == "audio" and audio is not None:
        return "uint8", [audio.n_mel_bins], config.audio_token_id
    raise invalid(f"{where}: this server has no tower for {kind}", "media")


def _data(item: GenerateMedia, where: str) -> bytes:
    try:
        data = base64_bytes(item.data)
    except MediaError as error:
        raise invalid(f"{where}.data: {error}", "media") from error
    wanted = math.prod(item.shape) * np.dtype(item.dtype).itemsize
    if len(data) != wanted:
        raise invalid(f"{where}.data has {len(data)} bytes, its shape takes {wanted}", "media")
    return data


def _check_values(data: bytes, item: GenerateMedia, config: ModelConfig, where: str) -> None:
    values = np.frombuffer(data, item.dtype)
    if item.kind == "image" and not np.isfinite(values).all():
        raise invalid(f"{where}.data holds what is no number", "media")
    if item.kind == "audio" and config.audio is not None:
        most = config.audio.mel_vocab_size - 1
        if int(values.max()) > most:
            raise invalid(f"{where}.data holds {values.max()}; bins are from 0 to {most}", "media")


def _digest(item: GenerateMedia, data: bytes) -> bytes:
    """Made here: equal digests share what is cached."""
    digest = hashlib.sha256(f"{item.kind} {item.dtype} {item.shape} ".encode())
    digest.update(data)
    return digest.digest()
