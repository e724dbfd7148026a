"""MP3 streams that do not say how long they are.

An MP3 usually starts with a Xing frame, which holds the number of frames. Streams (speech services,
cut or joined files) have none; libsndfile then guesses the length from the first frame and reads no
further, which loses sound when the bit rate varies. So the frames are counted here, from their
headers, and a Xing frame is put in front.
"""

import struct
from dataclasses import dataclass

# kbit/s by bit-rate index, layer III, for MPEG 1 and for MPEG 2 and 2.5.
_BIT_RATES = {
    True: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_SAMPLE_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_XING_BIT_RATE_INDEX = 9


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """A layer III frame header: its size in bytes, and what all frames of a stream share."""

    size: int
    version: int
    sample_rate: int
    is_mono: bool


def with_length(data: bytes) -> bytes:
    """The same MP3 with a Xing frame in front, unless it has one or is no layer III stream."""
    start = _skip_id3(data)
    first = _frame(data, start)
    if first is None:
        return data
    head = data[start : start + first.size]
    if b"Xing" in head or b"Info" in head:
        return data
    return _xing_frame(data[start : start + 4], first, _count_frames(data, start)) + data[start:]


def _skip_id3(data: bytes) -> int:
    if data[:3] != b"ID3" or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size + (10 if data[5] & 0x10 else 0)


def _count_frames(data: bytes, start: int) -> int:
    first = _frame(data, start)
    num_frames = 0
    place = start
    while place >= 0 and first is not None:
        frame = _frame(data, place)
        if frame and (frame.version, frame.sample_rate) == (first.version, first.sample_rate):
            place += frame.size
            if place > len(data):
                break  # cut short
            num_frames += 1
        else:
            place = data.find(b"\xff", place + 1)  # lost: tags at the end, or damage
    return num_frames


def _frame(data: bytes, place: int) -> _Frame | None:
    if len(data) < place + 4:
        return None
    (head,) = struct.unpack_from(">I", data, place)
    version, layer = head >> 19 & 3, head >> 17 & 3
    bit_rate_index, rate_index = head >> 12 & 15, head >> 10 & 3
    is_frame = head >> 21 == 0x7FF and version != 1 and layer == 1
    if not is_frame or bit_rate_index in (0, 15) or rate_index == 3:
        return None
    return _Frame(
        size=_size(version, bit_rate_index, rate_index) + (head >> 9 & 1),
        version=version,
        sample_rate=_SAMPLE_RATES[version][rate_index],
        is_mono=head >> 6 & 3 == 3,
    )


def _size(version: int, bit_rate_index: int, rate_index: int) -> int:
    bits = 1000 * _BIT_RATES[version == 3][bit_rate_index - 1]
    return (144 if version == 3 else 72) * bits // _SAMPLE_RATES[version][rate_index]


def _xing_frame(head: bytes, first: _Frame, num_frames: int) -> bytes:
    """A silent frame of the same kind; readers know it by the word after the side information."""
    bare = bytes([head[0], head[1] | 1, _XING_BIT_RATE_INDEX << 4 | head[2] & 0x0C, head[3]])
    side = {(True, False): 32, (True, True): 17, (False, False): 17, (False, True): 9}
    body = bare + bytes(side[first.version == 3, first.is_mono])
    body += b"Xing" + struct.pack(">II", 1, num_frames)
    made = _frame(bare, 0)
    assert made is not None
    return body.ljust(made.size, b"\0")
