"""Text to o200k ids and back, and the special ids that structure a chat.

The byte-pair encoding itself is tml-renderers'; it is imported when a `Tokenizer` is made, because
it loads torch. The tables of special ids are here, for those who need no more than that.
"""

import functools
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Final

from suzuri.model.config import FIRST_SPECIAL, NUM_IDS

ENDOFTEXT: Final = 199999
MESSAGE_USER: Final = 200000
MESSAGE_MODEL: Final = 200001
MESSAGE_SYSTEM: Final = 200002
MESSAGE_TOOL: Final = 200003
CONTENT_TEXT: Final = 200004
CONTENT_IMAGE: Final = 200005
CONTENT_MODEL_END_SAMPLING: Final = 200006
"""The stop token: it ends a turn."""
CONTENT_THINKING: Final = 200008
END_MESSAGE: Final = 200010
"""Ends a block, not the turn."""
CONTENT_AUDIO_INPUT: Final = 200020
CONTENT_TOOL_ERROR: Final = 200022
AUDIO: Final = 200023
CONTENT_XML: Final = 200024
BEGIN_OF_TEXT: Final = 200028
AUDIO_END: Final = 200043
CONTENT_INVOKE_TOOL_JSON: Final = 200049
CONTENT_INVOKE_TOOL_TEXT: Final = 200057
# The embeddings of these two are overwritten with what the towers make of a clip or a picture.
AUDIO_SLOT: Final = 200053
IMAGE_SLOT: Final = 200054

_NAMES = {
    ENDOFTEXT: "endoftext",
    MESSAGE_USER: "message_user",
    MESSAGE_MODEL: "message_model",
    MESSAGE_SYSTEM: "message_system",
    MESSAGE_TOOL: "message_tool",
    CONTENT_TEXT: "content_text",
    CONTENT_IMAGE: "content_image",
    CONTENT_MODEL_END_SAMPLING: "content_model_end_sampling",
    CONTENT_THINKING: "content_thinking",
    END_MESSAGE: "end_message",
    CONTENT_AUDIO_INPUT: "content_audio_input",
    CONTENT_TOOL_ERROR: "content_tool_error",
    AUDIO: "audio",
    CONTENT_XML: "content_xml",
    BEGIN_OF_TEXT: "begin_of_text",
    AUDIO_END: "audio_end",
    CONTENT_INVOKE_TOOL_JSON: "content_invoke_tool_json",
    CONTENT_INVOKE_TOOL_TEXT: "content_invoke_tool_text",
    FIRST_SPECIAL: "unused",
}
SPECIAL_NAMES: Mapping[int, str] = MappingProxyType(
    {id: _NAMES.get(id, f"unused_{id}") for id in range(FIRST_SPECIAL, NUM_IDS)}
)
"""Every special id and its name, which is spelled <|name|> in decoded text."""
SPECIAL_IDS: Mapping[str, int] = MappingProxyType({name: id for id, name in SPECIAL_NAMES.items()})


class Tokenizer:
    """o200k_base with the special ids above. It reads its table (most of a second) while whoever
    made it goes on; the first use waits for it."""

    def __init__(self) -> None:
        try:
            from tml_renderers.tokenizers import O200kBaseChatTokenizer
        except ImportError as error:
            raise ImportError(
                _why_not_importable(error, platform.system(), platform.machine(), _libc())
            ) from error
        thread = ThreadPoolExecutor(max_workers=1)
        self._made = thread.submit(O200kBaseChatTokenizer)
        thread.shutdown(wait=False)

    @functools.cached_property
    def native(self) -> Any:
        """For tml-renderers' own functions, which take nothing else."""
        return self._made.result()

    def encode(self, text: str) -> list[int]:
        """Ordinary ids only: <|message_user|> in the text of a user stays those 16 characters."""
        try:
            return self.native.encode_ordinary(text)
        except UnicodeEncodeError as error:
            raise ValueError(
                f"character {error.start} of the text is half of a surrogate pair "
                f"({text[error.start]!r}), which is no character; send valid Unicode"
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids. Special ids are spelled <|name|>; bytes that are no UTF-8, such as
        the first half of a character, become U+FFFD, so decode a stream with `decode_bytes`."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        check_ids(ids)
        return self.native.decode_bytes(ids)

    def token_bytes(self, id: int) -> bytes:
        return self.decode_bytes([id])


def check_ids(ids: Sequence[int]) -> None:
    """Raises for what is no o200k id."""
    if len(ids) and not (min(ids) >= 0 and max(ids) < NUM_IDS):
        wrong = sorted({id for id in ids if not 0 <= id < NUM_IDS})
        raise ValueError(f"not token ids (0..{NUM_IDS - 1}): {listed(wrong)}")


def listed(ids: Sequence[int]) -> str:
    """The ids for an error message, the first few if they are many."""
    shown = ", ".join(map(str, ids[:10]))
    return shown if len(ids) <= 10 else f"{shown} and {len(ids) - 10} more"


def _libc() -> str:
    return platform.libc_ver()[0] or "no glibc"


def _why_not_importable(error: ImportError, system: str, machine: str, libc: str) -> str:
    is_served = (system == "Linux" and libc == "glibc" and machine in ("x86_64", "aarch64")) or (
        system == "Darwin" and machine == "arm64"
    )
    if is_served:
        return f"cannot import tml-renderers ({error}): pip install 'tml-renderers>=0.2.1,<0.3'"
    return (
        f"tml-renderers, which holds the tokenizer, does not exist for this machine ({system}, "
        f"{machine}, {libc}); it does for Linux with glibc on x86_64 and aarch64, and for macOS on "
        "arm64"
    )
