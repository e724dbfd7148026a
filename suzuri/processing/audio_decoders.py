"""The decoders behind `audio_files.py`: each opens a clip far enough to know its length."""

import io
import struct
import wave
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from suzuri.processing.errors import MediaError, MissingDecoderError
from suzuri.processing.mp3 import with_length
from suzuri.processing.sources import is_text

SAMPLE_RATE = 16000

_BLOCK = 1 << 16
_FORMATS = "WAV, FLAC, MP3 or Ogg"
_SOUNDFILE_STARTS = (b"RIFF", b"RF64", b"riff", b"fLaC", b"OggS", b"ID3", b"FORM", b".snd", b"caff")


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A clip whose header has been read; `read` gives its mono samples."""

    num_frames: int
    rate: int
    read: Callable[[], NDArray[np.float32]]


def open_clip(file: IO[bytes], max_seconds: float) -> Clip:
    start = file.read(64)
    file.seek(0)
    if not start:
        raise MediaError(f"the clip is empty (0 bytes); send {_FORMATS}")
    if start[4:8] == b"ftyp":
        return _open_with_av(file, "mov", max_seconds)
    if start.startswith(b"\x1aE\xdf\xa3"):
        return _open_with_av(file, "matroska", max_seconds)
    if start[0] == 0xFF and start[1:2] and start[1] & 0xF6 == 0xF0:
        return _open_with_av(file, "aac", max_seconds)
    is_mp3 = start[0] == 0xFF and start[1:2] > b"\xe0"
    if not (is_mp3 or start.startswith(_SOUNDFILE_STARTS)):
        if is_text(start):
            raise MediaError(f"this is text ({start[:40]!r}), not a clip; send {_FORMATS}")
        raise MediaError(f"unknown audio format (first bytes {start[:8]!r}); send {_FORMATS}")
    if is_mp3 or start.startswith(b"ID3"):
        return _open_with_soundfile(io.BytesIO(with_length(file.read())))
    return _open_plain_wav(file) or _open_with_soundfile(file)


def _open_plain_wav(file: IO[bytes]) -> Clip | None:
    try:
        header = wave.open(file, "rb")  # noqa: SIM115 (closing it would not close the file)
    except (wave.Error, EOFError, RuntimeError, struct.error):
        file.seek(0)
        return None
    if (header.getsampwidth(), header.getframerate()) != (2, SAMPLE_RATE):
        file.seek(0)
        return None
    num_channels = header.getnchannels()
    begin = file.tell()
    num_bytes = file.seek(0, io.SEEK_END) - begin
    num_frames = min(header.getnframes(), num_bytes // (2 * num_channels))

    def read() -> NDArray[np.float32]:
        file.seek(begin)
        samples = np.frombuffer(file.read(num_frames * 2 * num_channels), "<i2")
        return mono(samples.reshape(-1, num_channels) / np.float32(1 << 15))

    return Clip(num_frames=num_frames, rate=SAMPLE_RATE, read=read)


def _open_with_soundfile(file: IO[bytes]) -> Clip:
    soundfile = package("soundfile", "this kind of clip", "pip install soundfile soxr")
    try:
        clip = soundfile.SoundFile(_Seekable(file))
    except soundfile.SoundFileError as error:
        reason = getattr(error, "error_string", error)
        raise MediaError(f"the clip cannot be read ({reason}); send {_FORMATS}") from error
    num_frames: int = clip.frames

    def read() -> NDArray[np.float32]:
        blocks: list[NDArray[np.float32]] = []
        missing = num_frames
        try:
            while missing:
                block = clip.read(min(missing, _BLOCK), dtype="float32", always_2d=True)
                if not len(block):
                    raise MediaError(
                        f"the clip is cut short: its header promises {num_frames} samples, "
                        f"{num_frames - missing} are there; send it again whole"
                    )
                blocks.append(mono(block))
                missing -= len(block)
        except soundfile.SoundFileError as error:
            raise MediaError(f"the clip is damaged ({error}); send it again whole") from error
        return np.concatenate(blocks)

    return Clip(num_frames=num_frames, rate=clip.samplerate, read=read)


@dataclass(frozen=True)
class _Seekable:
    """A file for libsndfile, which seeks before the start of damaged ones. A Python error there
    could only be printed, not raised; now the position stays, and libsndfile sees that it did."""

    file: IO[bytes]

    def read(self, size: int) -> bytes:
        return self.file.read(size)

    def tell(self) -> int:
        return self.file.tell()

    def seek(self, offset: int, whence: int) -> int:
        try:
            return self.file.seek(offset, whence)
        except (ValueError, OSError):
            return self.file.tell()


def _open_with_av(file: IO[bytes], container_format: str, max_seconds: float) -> Clip:
    """The format is given by name: left to guess, FFmpeg also opens playlists, which name other
    files and addresses."""
    names = {"mov": "M4A or MP4", "matroska": "WebM or Matroska", "aac": "AAC"}
    name = names[container_format]
    av = package("av", name, f"pip install av (or send {_FORMATS})")
    blocks: list[NDArray[np.float32]] = []
    num_frames = 0
    try:
        with av.open(file, format=container_format) as container:
            if not container.streams.audio:
                raise MediaError(f"the {name} file has no sound track")
            stream = container.streams.audio[0]
            rate: int = stream.rate  # some AAC says half of what it decodes to
            to_float = av.AudioResampler(format="fltp")
            for packed in container.decode(stream):
                rate = packed.sample_rate
                for frame in to_float.resample(packed):
                    blocks.append(mono(frame.to_ndarray().T))
                    num_frames += len(blocks[-1])
                if num_frames > max_seconds * rate:
                    raise MediaError(
                        f"the clip lasts over {num_frames / rate:.1f} s, the limit is "
                        f"{max_seconds:g} s; cut it into parts"
                    )
    except MediaError:
        raise
    except (av.FFmpegError, ValueError) as error:  # ValueError: the rate or layout changes midway
        raise MediaError(f"the {name} clip is damaged ({error}); send it again whole") from error
    samples = np.concatenate(blocks) if blocks else np.zeros(0, np.float32)
    return Clip(num_frames=num_frames, rate=rate, read=lambda: samples)


def package(name: str, what: str, fix: str) -> ModuleType:
    try:
        return import_module(name)
    except (ImportError, OSError) as error:  # OSError: installed, but its C library is not
        raise MissingDecoderError(f"{what} needs the package {name!r} ({error}): {fix}") from error


def mono(samples: NDArray[Any]) -> NDArray[np.float32]:
    """[samples, channels] to [samples]."""
    return samples.mean(axis=1, dtype=np.float32)
