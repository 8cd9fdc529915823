"""The five ways a user can be told that something is wrong.

Every message says what was given, what is allowed, and what to do, with the values.
"""


class PeriluneError(Exception):
    """Base of all errors that perilune raises on purpose; the command line prints them without a traceback."""


class ConfigError(PeriluneError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another one."""


class CheckpointError(PeriluneError):
    """A checkpoint is missing, truncated, foreign, or does not fit the model."""


class CapacityError(PeriluneError):
    """A resource ran out: memory, disk space, cache pages, or time."""


class RequestError(PeriluneError, ValueError):
    """The input of a run or of a request cannot be used: a bad file, an empty corpus, a malformed message."""


class SandboxError(PeriluneError):
    """A sandbox could not be created, reached, saved or restored."""
