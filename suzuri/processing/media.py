"""The pictures and clips of a prompt: from what people pass to what a tower reads, and its count.

Counting reads headers only, so that a prompt that is too long is refused before anything is
decoded. Read next: images.py, audio.py, sources.py.
"""

import base64
import binascii
import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from suzuri.model.config import ModelConfig
from suzuri.processing.audio import audio_bins, num_audio_tokens
from suzuri.processing.errors import MediaError
from suzuri.processing.images import image_patches, num_image_tokens

Kind = Literal["image", "audio"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedMedia:
    """A picture or clip that fills `count` tokens from `index` on with what a tower makes of
    `inputs`. Equal `digest`, equal inputs."""

    kind: Kind
    index: int
    count: int
    digest: bytes
    inputs: NDArray[Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MediaSource:
    """A picture or clip as it was passed: a path, bytes, a PIL picture, or samples and their rate
    (None for a file, which says its own)."""

    kind: Kind
    source: Any
    rate: int | None = None


class MediaReader:
    """Reads media with the settings of one model. `local_files`: whether paths and file: URLs may
    be opened; never where the text comes from somebody else."""

    def __init__(self, config: ModelConfig, *, local_files: bool) -> None:
        self._vision, self._audio = config.vision, config.audio
        self.slots: dict[Kind, int] = {
            "image": config.image_token_id,
            "audio": config.audio_token_id,
        }
        """The id at the places that media of either kind fill."""
        self._local_files = local_files

    def source(self, kind: Kind, value: Any, rate: int | None = None) -> MediaSource:
        """What was passed as a picture or clip. Raises MediaError for what is neither."""
        if isinstance(value, str):
            value = self._from_url(value)
        elif isinstance(value, os.PathLike):
            self._refuse_file(os.fspath(value))  # pyright: ignore[reportUnknownArgumentType]
        if kind == "audio" and isinstance(value, tuple):
            value, rate = _samples_and_rate(value)  # pyright: ignore[reportUnknownArgumentType]
        allowed = (str, os.PathLike, bytes, bytearray)
        if kind == "image" and not isinstance(value, (*allowed, Image.Image)):
            raise MediaError(
                f"a picture of type {type(value).__name__}; give a path, bytes or a PIL picture"
            )
        if kind == "audio" and not isinstance(value, (*allowed, np.ndarray, list)):
            raise MediaError(
                f"a clip of type {type(value).__name__}; give a path, bytes, or (samples, rate)"
            )
        return MediaSource(kind=kind, source=value, rate=rate)

    def count(self, item: MediaSource) -> int:
        """Its tokens, from the header."""
        if item.kind == "audio":
            if self._audio is None:
                raise MediaError("this model has no audio tower; leave the clip out")
            return num_audio_tokens(item.source, sample_rate=item.rate)
        vision = self._vision
        if vision is None:
            raise MediaError("this model has no vision tower; leave the picture out")
        if vision.n_channels != 3:
            raise MediaError(
                f"this model's vision tower reads {vision.n_channels} channels; pictures have 3"
            )
        return num_image_tokens(item.source, patch_size=vision.patch_size)

    def place(self, item: MediaSource, index: int, count: int) -> PlacedMedia:
        """Decode it; it must have the tokens that were counted."""
        inputs = self._inputs(item)
        if len(inputs) != count:
            raise MediaError(f"{count} tokens were counted and {len(inputs)} came; send it whole")
        digest = hashlib.sha256(f"{item.kind} {inputs.dtype} {inputs.shape} ".encode())
        digest.update(np.ascontiguousarray(inputs).data)
        return PlacedMedia(
            kind=item.kind, index=index, count=count, digest=digest.digest(), inputs=inputs
        )

    def _inputs(self, item: MediaSource) -> NDArray[Any]:
        if item.kind == "image":
            assert self._vision is not None
            return image_patches(
                item.source,
                patch_size=self._vision.patch_size,
                temporal_patch_size=self._vision.temporal_patch_size,
            )
        assert self._audio is not None
        return audio_bins(
            item.source,
            sample_rate=item.rate,
            n_mel_bins=self._audio.n_mel_bins,
            mel_vocab_size=self._audio.mel_vocab_size,
            dmel_min=self._audio.dmel_min_value,
            dmel_max=self._audio.dmel_max_value,
        )

    def _from_url(self, url: str) -> str | bytes:
        """Bytes of a data: URL, the path of a file: URL, or the path itself."""
        if not url.strip():
            raise MediaError("the URL is empty; give a path, a file: or a data: URL")
        scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", url)
        if scheme is None:
            self._refuse_file(url)
            return url
        if scheme[1].lower() == "data":
            return data_url_bytes(url)
        if scheme[1].lower() == "file":
            parts = urlsplit(url)
            if parts.netloc not in ("", "localhost"):
                raise MediaError(f"{url[:60]!r} names a file on another machine; give a local one")
            self._refuse_file(url)
            return unquote(parts.path)
        raise MediaError(
            f"{url[:60]!r}: nothing is fetched from the network here; pass a path, the bytes, or "
            "a data: URL"
        )

    def _refuse_file(self, path: object) -> None:
        if not self._local_files:
            raise MediaError(f"{str(path)[:60]!r}: local files are not read here; use a data: URL")


def data_url_bytes(url: str) -> bytes:
    """The bytes of a data: URL. What they are is told by themselves, not by the URL's type.

    Base64 may have line breaks, percent signs, the URL-safe alphabet, and lack its padding.
    """
    head, comma, body = url.partition(",")
    if not comma:
        raise MediaError(f"{url[:60]!r}: a data: URL has a comma before its data")
    options = [option.strip().lower() for option in head[len("data:") :].split(";")[1:]]
    if "base64" in options:
        return base64_bytes(unquote(body))
    if re.search(r"%(?![0-9A-Fa-f]{2})", body) or not body.isascii():
        raise MediaError(
            f"{head[:60]!r}: without ;base64 the data must be percent-encoded bytes; add ;base64 "
            "if it is base64"
        )
    return unquote_to_bytes(body)


def base64_bytes(text: str) -> bytes:
    """Decodes standard or URL-safe base64, with white space and with or without padding."""
    compact = "".join(text.split()).rstrip("=")
    if not compact:
        raise MediaError("the base64 data is empty")
    if "+" in compact or "/" in compact:
        alphabet = b"+/"
    else:
        alphabet = b"-_"
    try:
        padded = compact + "=" * (-len(compact) % 4)
        return base64.b64decode(padded, altchars=alphabet, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"the data is no base64 ({error}); encode it again") from error


def match_places(
    token_ids: Sequence[int], counts: Sequence[tuple[Kind, int]], slots: Mapping[Kind, int]
) -> list[tuple[int, int]]:
    """(index, count) of each item among the media places of a prompt, in their order.

    `counts` lists the items of either kind in the order of their places among those of that kind.
    Raises ValueError when places and items do not match.
    """
    for kind, slot in slots.items():
        there = sum(token == slot for token in token_ids)
        wanted = sum(count for of, count in counts if of == kind)
        if there != wanted:
            raise ValueError(
                f"the prompt has {there} {kind} places (id {slot}), what was passed as {kind} "
                f"needs {wanted}; build such prompts with chat()"
            )
    found: dict[int, tuple[int, int]] = {}
    for kind, slot in slots.items():
        places = [i for i, token in enumerate(token_ids) if token == slot]
        taken = 0
        for order, (of, count) in enumerate(counts):
            if of != kind:
                continue
            own = places[taken : taken + count]
            if own[-1] - own[0] != count - 1:
                raise ValueError(
                    f"{kind} {order} needs {count} places (id {slot}) in a row; in the prompt they "
                    "are interrupted"
                )
            found[order] = (own[0], count)
            taken += count
    return [found[order] for order in range(len(counts))]


def _samples_and_rate(value: tuple[Any, ...]) -> tuple[Any, int]:
    if len(value) != 2 or isinstance(value[1], bool) or not isinstance(value[1], int):
        raise MediaError("samples come as (samples, rate in Hz)")
    return value[0], value[1]
