"""What `suzuri generate` can be asked. No torch here."""

import dataclasses
import os
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from suzuri.engine.config import EngineConfig
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.presets import DEFAULT_MODEL

MAX_SEED = 2**62
STDIN = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Complete prompts and write one JSON line for each, in their order.

    Exit code 0 when all succeeded, 1 when some line failed, 2 when the input cannot be used.
    """

    model: Positional[str] = DEFAULT_MODEL
    """A model folder or a hub id; a preset or config.json with --random-weights. The default is the
    small model that comes with this package; nano is its short name."""

    prompt: tuple[str, ...] = ()
    """Prompts on the command line, before those of --input."""

    input: str | None = None
    """File with a prompt per line, - for stdin (also when nothing is given and stdin is no
    terminal): JSON objects with "prompt", "prompt_token_ids" or "messages", maybe "id", and
    sampling parameters of their own; or plain text."""

    format: Literal["auto", "jsonl", "text"] = "auto"
    """Of the input; auto: JSON if the first line begins with a brace."""

    chat: bool = False
    """Plain prompts are what a user says in a conversation."""

    output: str = "-"
    """File for the results, - for stdout. A file that is there is replaced."""

    random_weights: bool = False
    """Take only the shape of the model and draw its weights."""

    text_only: bool = False
    """Leave the towers out, whether or not the files hold them; pictures and clips are refused."""

    max_tokens: int = 256
    """Tokens of an answer at most."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    seed: int | None = None
    """Makes every answer repeatable; also that of random weights."""

    n: int = 1
    """Answers to each prompt."""

    stop: tuple[str, ...] = ()
    """Texts that end an answer."""

    logprobs: int | None = None
    """Log-probs of each token, and of so many most likely ones."""

    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    """Arithmetic."""

    device: str = "cpu"
    """cpu or cuda."""

    max_context: int | None = None
    """Longest prompt and answer together (default: the model's, or what memory holds)."""

    max_running: int = 64
    """Answers that are written at once."""

    memory_gb: float | None = None
    """Memory for weights and state, in GB (default: what is free)."""

    def resolve(self) -> "GenerateConfig":
        """Checks the fields; makes stdin the input where prompts can only come from there. Raises
        ValueError naming the flag and the fix."""
        if not self.prompt and self.input is None:
            if not _is_piped():
                raise ValueError(
                    "nothing to complete; give --prompt TEXT or --input FILE (- is stdin)"
                )
            return dataclasses.replace(self, input="-").resolve()
        if self.input is not None and self.input != "-":
            path = Path(self.input)
            if not path.exists():
                raise ValueError(f"--input {self.input}: there is no such file")
            if path.is_dir():
                raise ValueError(f"--input {self.input} is a folder; give a file")
        if self.output != "-":
            self._check_output(Path(self.output))
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"--seed {self.seed}: must be from 0 to {MAX_SEED}")
        self.sampling()
        self.engine()
        return self

    def _check_output(self, path: Path) -> None:
        if path.is_dir():
            raise ValueError(f"--output {path} is a folder; give a file")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"--output {path}: there is no folder {path.absolute().parent}")
        if self.input not in (None, "-") and path.exists() and path.samefile(str(self.input)):
            raise ValueError(f"--output {path} is the input itself; give another file")

    def sampling(self) -> SamplingParams:
        """Of lines that ask for nothing else. Raises ValueError naming the field."""
        return SamplingParams(
            n=self.n,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            logprobs=self.logprobs,
        )

    def engine(self) -> EngineConfig:
        """The engine's part. Raises ValueError naming the field."""
        return EngineConfig(
            dtype=self.dtype,
            max_context=self.max_context,
            max_running=self.max_running,
            memory_gb=self.memory_gb,
            token_budget=max(EngineConfig().token_budget, self.max_running),
        )


def _is_piped() -> bool:
    """Whether stdin is open and no terminal."""
    try:
        os.fstat(STDIN)
    except OSError:
        return False
    return not os.isatty(STDIN)
