"""What `suzuri inspect` can be asked. No torch here."""

import dataclasses

from tyro.conf import Positional


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show what a checkpoint holds, by part, and whether it is complete.

    Reads headers, and the few numbers that go with NVFP4 tensors. Exit code 0 when it would load, 1
    when something is missing or wrong (every fault is listed), 2 when there is no model.
    """

    model: Positional[str]
    """A model folder; or a hub id, a config.json or a preset, which have a shape to show."""

    tensors: tuple[str, ...] | None = None
    """List single tensors too: all, or those whose name has one of these words or fits one of these
    patterns ('*.layers.3.*')."""

    random_weights: bool = False
    """Show the shape alone, as a model with random weights would have it; files do not matter."""

    json: bool = False
    """Print JSON instead of tables."""

    def resolve(self) -> "InspectConfig":
        """Checks the fields. Raises ValueError naming the flag and the fix."""
        if not self.model.strip():
            raise ValueError("MODEL is empty; give a model folder")
        return self
