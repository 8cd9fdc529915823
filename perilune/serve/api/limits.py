"""What a request may ask for, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one server.

    Attributes:
        body_bytes: largest request body.
        choices: largest `n`.
        prompts: most prompts in one completion request.
        default_max_tokens: tokens of an answer whose request does not say.
        output_tokens: most tokens of any answer, whatever its request says; None = as many as fit.
        waiting: requests that may wait or run at once.
        heartbeat_seconds: silence after which a stream sends a comment, so that proxies keep it open.
        request_seconds: time for a whole answer; None = no end.
        client_seconds: time that a client may take to go on with its request, or to read what was sent, before it counts as
            gone.

    Raises:
        ConfigError: a limit that nothing could keep.
    """

    body_bytes: int = 16 * 2**20
    choices: int = 8
    prompts: int = 64
    default_max_tokens: int = 512
    output_tokens: int | None = None
    waiting: int = 256
    heartbeat_seconds: float = 10.0
    request_seconds: float | None = None
    client_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("body_bytes", "choices", "prompts", "default_max_tokens", "waiting", "heartbeat_seconds",
                     "client_seconds", "output_tokens", "request_seconds"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"the limit {name}={value} must be more than 0")
