"""The Triton that the kernel tests are written for: its interpreter and its compiler change from release to release."""

from __future__ import annotations

TESTED = "3.6."


def obstacle() -> str | None:
    """Why the kernel tests cannot run here; None if they can."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed; pip install perilune[interpreter]"
    if triton.__version__.startswith(TESTED):
        return None
    return f"these tests are for Triton {TESTED}x, here is {triton.__version__}"
