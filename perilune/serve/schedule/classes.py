"""Classes of requests by the length of their prompts, each with its own share of a step and of the running slots.

Requests differ in cost by three orders of magnitude. In one queue a burst of long prompts would make every short request wait
for all of them; separate budgets keep the first token of the short ones near (report §5.4.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perilune.errors import ConfigError
from perilune.serve.schedule.pace import PATIENCE


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceClass:
    """A class.

    Attributes:
        name: for metrics.
        up_to: most prompt tokens of a request in it.
        tokens: share of a step's prompt tokens that is its own as long as it has work.
        slots: share of the running slots that others leave free for it.
        cap: most of a step's prompt tokens, as a share, while other classes are at work. Below 1 its prompts are also cut
            into pieces while those of classes without a cap keep coming: a step's length is what these wait for.
        patience: of classes with a cap, how long such a piece may take, in times of a step of those that wait; see `pace`.

    Raises:
        ConfigError: a share is not in 0 to 1, or the patience is not above 0.
    """

    name: str
    up_to: int
    tokens: float = 0.0
    slots: float = 0.0
    cap: float = 1.0
    patience: float = PATIENCE

    def __post_init__(self) -> None:
        for field, value in (("tokens", self.tokens), ("slots", self.slots), ("cap", self.cap)):
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"class {self.name}: {field}={value} must be a share, 0 to 1")
        if not self.patience > 0.0:
            raise ConfigError(
                f"class {self.name}: patience={self.patience} must be above 0; 1 is one step of short prompts"
            )


def service_classes(context_length: int, patience: float = PATIENCE) -> tuple[ServiceClass, ...]:
    """Three classes for a context: K3's bounds of 2,048 and 32,768 tokens for one of 131,072 and more, smaller ones below.

    Short prompts wait for nothing longer than a piece of the others; `patience` says how long that is.
    """
    short = min(2048, max(256, context_length // 32))
    medium = max(4 * short, min(32768, context_length // 4))
    return (
        ServiceClass(name="short", up_to=short, tokens=0.3, slots=0.25),
        ServiceClass(name="medium", up_to=medium, tokens=0.2, slots=0.125, cap=0.75, patience=patience),
        ServiceClass(name="long", up_to=2**62, tokens=0.2, cap=0.5, patience=patience),
    )


def check_classes(classes: Sequence[ServiceClass]) -> None:
    """Check that classes are ascending, cover every length, and reserve no more than there is.

    Raises:
        ConfigError: they do not.
    """
    bounds = [kind.up_to for kind in classes]
    if not classes or bounds != sorted(set(bounds)):
        raise ConfigError(f"classes end at {bounds} prompt tokens; give at least one, with ascending bounds")
    for field in ("tokens", "slots"):
        total = sum(getattr(kind, field) for kind in classes)
        if total > 1.0 + 1e-9:
            raise ConfigError(f"the classes reserve {total:.2f} of all {field}; at most 1 can be given")


def class_of(prompt: int, classes: Sequence[ServiceClass]) -> int:
    """Index of the class of a prompt with so many tokens; the last class takes all that are longer than its bound."""
    return next((index for index, kind in enumerate(classes) if prompt <= kind.up_to), len(classes) - 1)


def patience_of(classes: Sequence[ServiceClass]) -> float:
    """That of the classes with a cap, the least of them."""
    return min((kind.patience for kind in classes if kind.cap < 1.0), default=PATIENCE)
