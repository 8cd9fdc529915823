"""Run the commands of a Markdown page: `python tests/journeys/run_readme.py README.md`.

Every line of a ```bash block is run from the project's root, in order, as a reader would; lines in other blocks
(```console: set-up and interactive programs) are not. Needs `runs/demo`, which the demo leaves behind.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600


def commands(page: str) -> list[str]:
    """The command lines of the page's bash blocks; a trailing backslash continues a line, # starts a comment."""
    lines: list[str] = []
    for block in re.findall(r"^```bash\n(.*?)^```", page, flags=re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+#.*$", "", line).strip()
            if line and not line.startswith("#"):
                lines.append(line)
    return lines


def main(arguments: list[str]) -> int:
    environment = dict(os.environ, PATH=f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for page in arguments or ["README.md"]:
        for command in commands((ROOT / page).read_text(encoding="utf-8")):
            started = time.monotonic()
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
            )
            print(f"{time.monotonic() - started:6.1f} s  {command}", flush=True)
            if done.returncode:
                print(
                    f"FAILED {page}: `{command}` ended with {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
                )
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
