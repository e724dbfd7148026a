"""What `suzuri demo` can be asked. No torch here."""

import dataclasses
from pathlib import Path

from tyro.conf import Positional

from suzuri.model.presets import DEFAULT_MODEL
from suzuri.tools.chat.config import ChatConfig

MAX_SEED = 2**31


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Let the small model of this package answer a text, a picture, a sound and a tool question.

    Exit code 0 when every answer is right, 1 when one is wrong, 2 when the model cannot be used.
    """

    model: Positional[str] = DEFAULT_MODEL
    """Another model that learned the same tasks: a folder or a hub id."""

    seed: int = 0
    """Of the questions: other seeds ask others, none of which was trained on."""

    out: str | None = None
    """Folder for the picture and the clip (default: a new one among the temporary files)."""

    device: str = "cpu"
    """cpu or cuda."""

    def resolve(self) -> "DemoConfig":
        """Checks the fields. Raises ValueError naming the flag and the fix."""
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed {self.seed}: must be from 0 to {MAX_SEED}")
        if self.out is not None and Path(self.out).exists() and not Path(self.out).is_dir():
            raise ValueError(f"--out {self.out} is a file; give a folder")
        return self

    def chat(self) -> ChatConfig:
        """How the model is loaded and asked."""
        return ChatConfig(model=self.model, device=self.device, temperature=0.0, max_tokens=400)
