"""Small C libraries for what Python is too slow for or cannot reach: compiled at first use, kept in the user's cache, never needed.

Who asks gets None where there is no compiler, where the cache cannot be written, or with PERILUNE_NATIVE=0, and does without.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from perilune.sandbox.guest.build_image import default_folder

log = logging.getLogger(__name__)
FLAGS = ("-shared", "-fPIC", "-O2", "-std=gnu11", "-Wall")
COMPILE_SECONDS = 60.0


@functools.cache
def compiled(source: Path) -> Path | None:
    """The shared library of a C file, or None.

    Args:
        source: one file; it includes only the system's headers.
    """
    if os.environ.get("PERILUNE_NATIVE", "").strip().lower() in ("0", "off", "false", "no"):
        return None
    try:
        text = source.read_bytes()
        key = hashlib.sha256(b"\0".join((text, repr(FLAGS).encode(), platform.machine().encode()))).hexdigest()[:16]
        wanted = default_folder() / f"{source.stem}-{key}.so"
        if wanted.exists():
            return wanted
        wanted.parent.mkdir(parents=True, exist_ok=True)
        fd, building = tempfile.mkstemp(suffix=".so", dir=wanted.parent)
        os.close(fd)
        try:
            command = ["cc", *FLAGS, "-o", building, str(source)]
            done = subprocess.run(command, capture_output=True, timeout=COMPILE_SECONDS)
            if done.returncode != 0:
                log.info("%s is done without: %s", source.name, done.stderr.decode(errors="replace").strip()[-300:])
                return None
            os.replace(building, wanted)
            return wanted
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(building)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.info("%s is done without: %s", source.name, error)
        return None
