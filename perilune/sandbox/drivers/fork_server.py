"""The owner's side of a fork server: started at its first use, again after it died, ended on `close`.

The owner may be a trainer with a hundred gigabytes mapped and many threads: forking it is slow, and a child of a thread that ends
takes the kernel's parent-death signal for its parent's. The server is a fresh interpreter without any of that.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from perilune.sandbox.guest import wire


class ForkServer:
    """A process that runs `serve(fd)` of a module. Calls come from one thread at a time; the caller holds a lock.

    Args:
        module: with a function `serve` that takes the number of its socket's descriptor.
        seconds: that a call to it, and its end, may take.

    Attributes:
        process: None before its first use and after `close`.
    """

    def __init__(self, module: str, seconds: float) -> None:
        self.module, self.seconds = module, seconds
        self.process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def socket(self) -> socket.socket:
        """Where it takes requests (`guest.wire`); starts it unless it runs. Raises OSError."""
        if self._requests is None or self.process is None or self.process.poll() is not None:
            self.close()
            self._requests = self._start()
        return self._requests

    def _start(self) -> socket.socket:
        mine, its = wire.pair()
        code = (
            f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[3])!r}); "
            f"from {self.module} import serve; serve(int(sys.argv[1]))"
        )
        # Nothing of the owner's environment, which may hold keys, is in the memory of a process beside a guest.
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", code, str(its.fileno())], pass_fds=[its.fileno()], env=kept, cwd="/",
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        mine.settimeout(self.seconds)
        return mine

    def close(self) -> None:
        """End it; what it started ends with it."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self.process is not None:
            try:
                self.process.wait(self.seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
