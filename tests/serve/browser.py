"""A headless Chromium that a test drives over a pipe: no driver program, no socket."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest


def chromium() -> str:
    """Path of the browser; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium on this machine")
    return found


class Browser:
    """One page.

    Args:
        profile: empty folder for the browser's own files.
        size: width and height of the window.
    """

    def __init__(self, profile: Path, size: tuple[int, int] = (1200, 900)) -> None:
        (read, to_browser), (from_browser, write) = os.pipe(), os.pipe()
        command = [
            chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
            f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}", "about:blank",
        ]  # fmt: skip

        def connect() -> None:  # the browser reads commands from descriptor 3 and answers on 4
            ends = os.dup(read), os.dup(write)
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(command, preexec_fn=connect, pass_fds=(3, 4), stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        self._to, self._from = os.fdopen(to_browser, "wb", 0), os.fdopen(from_browser, "rb", 0)
        self._buffer, self._number, self._session = b"", 0, ""
        target = next(one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        self.call("Page.enable")
        self.resize(*size)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                data = self._from.read(65536)
                assert data, "the browser has ended"
                self._buffer += data
            line, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        """The size of the page; mobile = as a phone shows it."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)
        self.wait('document.readyState === "complete" && typeof send === "function"')

    def run(self, script: str) -> Any:
        """Value of a script; a promise is waited for."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 60.0) -> None:
        """Until a script is true."""
        until = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < until, f"never came: {condition}"
            time.sleep(0.05)

    def picture(self, path: Path) -> Path:
        """A screenshot."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(20)
        self._to.close()
        self._from.close()
