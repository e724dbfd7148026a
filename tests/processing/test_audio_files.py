"""Clips from files, bytes and samples: waveforms, and counts from headers."""

import io
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from suzuri.processing.audio import audio_bins, num_audio_tokens
from suzuri.processing.audio_decoders import open_clip
from suzuri.processing.audio_files import count_samples, load_waveform
from suzuri.processing.errors import MediaError
from suzuri.processing.mp3 import with_length
from tests.processing.clips import encoded, hiss, pcm, tone, wav


@pytest.fixture
def no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("soundfile", "soxr", "av"):
        monkeypatch.setitem(sys.modules, name, None)


def test_m14_numpy_lists_bytes_and_paths_give_the_same_bins(tmp_path: Path) -> None:
    samples = pcm(hiss(5003))
    path = tmp_path / "clip.raw"  # the name decides nothing
    path.write_bytes(wav(samples))
    floats = samples.astype(np.float32) / 32768
    expected = audio_bins(floats)
    assert expected.shape == (7, 80)
    sources: tuple[Any, ...] = (
        samples,
        samples.astype(np.int32) << 16,
        floats.astype(np.float64),
        floats.tolist(),
        tuple(floats.tolist()),
        floats[:, None],
        np.stack([samples, samples], axis=1),
        wav(samples),
        bytearray(wav(samples)),
        path,
        str(path),
        encoded(samples / 32768, 16000, "FLAC"),
        encoded(samples / 32768, 16000, "WAV", "FLOAT"),
    )
    for source in sources:
        assert np.array_equal(audio_bins(source), expected)
        assert num_audio_tokens(source) == 7


def test_m14_unsigned_bytes_as_samples() -> None:
    expected = np.array([-1, -0.5, 0, 127 / 128], np.float32)
    assert np.array_equal(load_waveform(np.array([0, 64, 128, 255], np.uint8)), expected)


@pytest.mark.usefixtures("no_extra")
def test_plain_wav_needs_no_package() -> None:
    samples = pcm(hiss(5003))
    assert np.array_equal(load_waveform(wav(samples)), samples / np.float32(32768))
    stereo = np.stack([samples, np.roll(samples, 1)], axis=1)
    mixed = (stereo.astype(np.float32) / 32768).mean(axis=1)
    assert np.array_equal(load_waveform(wav(stereo)), mixed)
    assert num_audio_tokens(wav(stereo)) == 7


@settings(max_examples=60, deadline=None)
@given(
    rate=st.sampled_from([8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 96000]),
    length=st.integers(1, 9000),
    container=st.sampled_from(["wav", "WAV/FLOAT", "WAV/PCM_24", "FLAC", "AIFF", "samples"]),
)
def test_the_count_from_the_header_is_the_count_after_decoding(
    rate: int, length: int, container: str
) -> None:
    samples = hiss(length)
    options: dict[str, int] = {}
    if container == "samples":
        source, options = samples, {"sample_rate": rate}
    elif container == "wav":
        source = wav(pcm(samples), rate)
    else:
        source = encoded(samples, rate, *container.split("/"))
    waveform = load_waveform(source, **options)
    assert len(waveform) == count_samples(source, **options) == -(-length * 16000 // rate)
    assert num_audio_tokens(source, **options) == len(audio_bins(source, **options))
    assert num_audio_tokens(len(waveform)) == num_audio_tokens(source, **options)


@pytest.mark.parametrize(
    ("container", "subtype", "rates"),
    [
        ("MP3", None, (8000, 22050, 44100)),
        ("OGG", "VORBIS", (16000, 44100)),
        ("OGG", "OPUS", (16000, 48000)),
    ],
)
def test_counts_of_lossy_files(container: str, subtype: str | None, rates: tuple[int, ...]) -> None:
    for rate in rates:
        for length in (1, 1151, 1153, 30011):
            data = encoded(hiss(length), rate, container, subtype)
            assert len(load_waveform(data)) == count_samples(data) == -(-length * 16000 // rate)


@pytest.mark.parametrize("num_channels", [1, 2])
@pytest.mark.parametrize("rate", [8000, 12000, 16000, 22050, 24000, 44100, 48000])
def test_mp3_streams_without_a_length_keep_all_their_sound(rate: int, num_channels: int) -> None:
    """The bit rate varies, so a guess from the first frame is wrong by half here."""
    both = np.stack([hiss(20011)] * num_channels, axis=1)
    data = encoded(both, rate, "MP3")
    second = data.index(data[:2], 2)
    assert b"Xing" in data[:second] or b"Info" in data[:second]
    bare = data[second:]
    per_frame = 1152 if rate > 24000 else 576
    raw = load_raw(data)
    for stream in (bare, b"ID3\4\0\0\0\0\1\2" + bytes(130) + bare, bare + b"TAG" + bytes(125)):
        again = load_raw(stream)
        # Without the encoder's notes its delay stays in, and its padding at the end.
        assert per_frame <= len(again) - len(raw) < 3 * per_frame
        assert np.array_equal(again[576:][: len(raw)], raw)
        assert count_samples(stream) == len(load_waveform(stream))
    half = load_raw(bare[: len(bare) // 2])
    assert len(raw) * 0.3 < len(half) < len(raw) * 0.7
    assert with_length(data) == data


@pytest.mark.parametrize(
    ("head", "size", "word_at"),
    [
        (b"\xff\xfa\x92\x00", 418, 36),  # MPEG 1, 44.1 kHz, stereo, with checksums, padded
        (b"\xff\xfb\x90\xc0", 417, 21),  # the same in mono
        (b"\xff\xf3\x84\x40", 192, 21),  # MPEG 2, 24 kHz, joint stereo
        (b"\xff\xe3\x48\xc0", 288, 13),  # MPEG 2.5, 8 kHz, mono
    ],
)
def test_the_length_put_in_front_of_an_mp3_stream(head: bytes, size: int, word_at: int) -> None:
    stream = (head + bytes(size - 4)) * 7
    made = with_length(stream)
    front = made[: -len(stream)]
    assert made.endswith(stream)
    assert front[:2] == bytes([0xFF, head[1] | 1])  # no checksum
    assert front[word_at : word_at + 12] == b"Xing" + struct.pack(">II", 1, 7)
    assert with_length(made) == made
    assert (
        with_length(stream[:-1])
        == made[: -len(stream)][: word_at + 8]
        + struct.pack(">I", 6)
        + bytes(len(front) - word_at - 12)
        + stream[:-1]
    )


def load_raw(data: bytes) -> NDArray[np.float32]:
    """At the clip's own rate, where a shift is a whole number of samples."""
    return open_clip(io.BytesIO(data), 60).read()


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000, 96000])
def test_resampling_keeps_a_tone(rate: int) -> None:
    expected = 0.5 * tone(440, 0.5)
    waveform = load_waveform(0.5 * tone(440, 0.5, rate), sample_rate=rate)
    np.testing.assert_allclose(waveform[800:-800], expected[800:-800], rtol=0, atol=2e-3)
    from_file = load_waveform(encoded(0.5 * tone(440, 0.5, rate), rate, "FLAC", "PCM_24"))
    np.testing.assert_allclose(from_file, waveform, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rate", [44100, 48000])
def test_resampling_folds_nothing_back(rate: int) -> None:
    """10 kHz does not exist at 16 kHz, so it must vanish instead of sounding at 6 kHz."""
    waveform = load_waveform(tone(10_000, 0.5, rate), sample_rate=rate)
    assert np.abs(waveform[800:-800]).max() < 1e-4


def test_channels_are_averaged_before_resampling() -> None:
    left, right = hiss(4000, seed=1), hiss(4000, seed=2)
    stereo = np.stack([left, right], axis=1)
    expected = load_waveform((left + right) / 2, sample_rate=24000)
    np.testing.assert_allclose(load_waveform(stereo, sample_rate=24000), expected, atol=1e-6)
    data = encoded(stereo, 24000, "WAV", "FLOAT")
    np.testing.assert_allclose(load_waveform(data), expected, atol=1e-6)


@pytest.mark.parametrize("promised", [0xFFFFFFFF, 0x7FFFFFFF, 4000])
def test_a_wav_is_as_long_as_what_it_holds(promised: int) -> None:
    """Recorders that stream write the header before they know the length."""
    samples = pcm(hiss(1700))
    data = wav(samples)
    streamed = data[:4] + struct.pack("<I", promised) + data[8:40] + struct.pack("<I", promised)
    streamed += data[44:] + b"\0"  # half a sample more
    assert count_samples(streamed) == 1700
    assert np.array_equal(load_waveform(streamed), samples / np.float32(32768))


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [("ipod", "aac", 48000), ("webm", "libopus", 48000), ("adts", "aac", 44100)],
)
def test_clips_read_through_pyav(container: str, codec: str, rate: int) -> None:
    av = pytest.importorskip("av")
    file = io.BytesIO()
    both = np.stack([tone(440, 1, rate), tone(440, 1, rate) / 2]).astype(np.float32)
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate, layout="stereo")
        frame = av.AudioFrame.from_ndarray(both, format="fltp", layout="stereo")
        frame.sample_rate = rate
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            output.mux(packet)
    waveform = load_waveform(file.getvalue())
    assert len(waveform) == count_samples(file.getvalue())
    assert abs(len(waveform) - 16000) < 1300
    middle = waveform[4000:12000]
    assert np.abs(np.fft.rfft(middle)).argmax() == 220
    np.testing.assert_allclose(np.sqrt(2 * np.square(middle).mean()), 0.75, atol=0.06)
    with pytest.raises(MediaError, match=r"limit is 0\.5 s"):
        load_waveform(file.getvalue(), max_seconds=0.5)
    with pytest.raises(MediaError, match="damaged"):
        load_waveform(file.getvalue()[:60])
