"""What a step may hold."""

from __future__ import annotations

from dataclasses import dataclass, field

from perilune.errors import ConfigError
from perilune.serve.schedule.classes import ServiceClass, check_classes, service_classes


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a step may hold.

    Attributes:
        sequences: most running sequences.
        step_tokens: most tokens of a step; decoding comes first, prompts get the rest.
        chunk: most tokens of one prompt in a step.
        grid: with a number above 0, chunks end at multiples of it or at the end of what is known, whatever else is in the
            step: the arithmetic of a sequence then does not depend on the others. `chunk` is not used.
        classes: see `classes`.

    Raises:
        ConfigError: a limit below 1, or classes that reserve more than there is.
    """

    sequences: int = 64
    step_tokens: int = 512
    chunk: int = 512
    grid: int = 0
    classes: tuple[ServiceClass, ...] = field(default_factory=lambda: service_classes(131072))

    def __post_init__(self) -> None:
        for name in ("sequences", "step_tokens", "chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        check_classes(self.classes)
