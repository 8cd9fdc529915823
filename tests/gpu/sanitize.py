"""Run small shapes of every GPU kernel under NVIDIA's compute-sanitizer: memcheck, then racecheck.

    python tests/gpu/sanitize.py [-k EXPRESSION] [--tools memcheck,racecheck,initcheck,synccheck]

Runs `test_bounds_gpu.py`, whose tensors lie between bands of poison anyway; without compute-sanitizer those bands are all that
looks for accesses beside a tensor, and this script says so and exits with 3. Races have no such substitute on a GPU: on the
CPU, the emulator turns the order of warps around (tests/ops).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
NOT_FOUND = 3


def sanitizer() -> str | None:
    """compute-sanitizer on the path, below CUDA_HOME, where a toolkit usually lies, or beside a pip package of NVIDIA's."""
    home = os.environ.get("CUDA_HOME", "")
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for _ in [0] if home), *PLACES]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    if found:
        return found
    packaged = sorted(path for folder in sys.path for path in Path(folder).glob("nvidia/**/bin/compute-sanitizer"))
    return str(packaged[0]) if packaged else None


def main() -> int:
    """Exit code: 0 clean, 1 something was found, 3 there is no compute-sanitizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="of pytest: which operations")
    parser.add_argument("--tools", default="memcheck,racecheck")
    chosen = parser.parse_args()
    program = sanitizer()
    if program is None:
        print("compute-sanitizer: not found; guard bands alone look for accesses beside a tensor", flush=True)
        return NOT_FOUND
    # Otherwise all tensors share a few large blocks of memory, inside which every access is allowed.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "test_bounds_gpu.py")]
    if chosen.k:
        tests += ["-k", chosen.k]
    worst = 0
    for tool in chosen.tools.split(","):
        print(f"compute-sanitizer --tool {tool}", flush=True)
        command = [program, "--tool", tool, "--error-exitcode", "1", "--print-limit", "20", *tests]
        worst = max(worst, subprocess.run(command, env=environment, check=False).returncode)
    return min(worst, 1)


if __name__ == "__main__":
    sys.exit(main())
