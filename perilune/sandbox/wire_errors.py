"""Typed errors on their way through a connection: an exception becomes a name, a message and a field, and the same one again.

Used by the HTTP service, its clients, and the fleet, so that a caller elsewhere catches what a caller in process would.
"""

from __future__ import annotations

from perilune.errors import CapacityError, ConfigError, PeriluneError, RequestError, SandboxError
from perilune.sandbox import protocol

_KINDS: tuple[type[PeriluneError], ...] = (
    protocol.TransitionError, protocol.DriverUnavailable, protocol.GuestLost, protocol.GuestFileError, protocol.StoreDamaged,
    protocol.StoreFull, protocol.Mismatch, protocol.SecretInSnapshot, protocol.NoSuchSandbox, SandboxError, CapacityError,
    ConfigError, RequestError, PeriluneError,
)  # fmt: skip
"""Special ones before what they are special cases of."""


def name_of(error: PeriluneError) -> str:
    """The name that stands for an error on the wire."""
    return next(kind.__name__ for kind in _KINDS if isinstance(error, kind))


def field_of(error: PeriluneError) -> str | None:
    """The field that a `Mismatch` names."""
    return error.field if isinstance(error, protocol.Mismatch) else None


def rebuilt(name: str, message: str, field: str | None = None) -> PeriluneError:
    """The error again; an unknown name becomes a SandboxError."""
    kind = next((kind for kind in _KINDS if kind.__name__ == name), SandboxError)
    error = kind.__new__(kind)
    # Its message is complete; its constructor would compose another one.
    Exception.__init__(error, message)
    if isinstance(error, protocol.Mismatch):
        error.field = field or ""
    return error
