"""Check a built wheel: `python tests/journeys/check_wheel.py dist/perilune-*.whl`.

Every file that git tracks under perilune/ must be in it (C sources, pages and templates are as needed as Python), and
the command line must run from it, away from the source tree: a demo of a few steps, chat server and report included.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def missing_files(wheel: Path) -> list[str]:
    """Tracked files of the package that the wheel lacks."""
    listing = subprocess.run(["git", "ls-files", "-z", "perilune"], cwd=ROOT, capture_output=True, check=True)
    wanted = {name for name in listing.stdout.decode().split("\0") if name}
    return sorted(wanted - set(zipfile.ZipFile(wheel).namelist()))


def run_from(site: Path, *arguments: str) -> str:
    """Run `perilune` from the folder `site`, in a folder that has no source tree; returns stdout."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site)!r}); from perilune.cli.main import main; "
               f"import perilune; assert perilune.__file__.startswith({str(site)!r}), perilune.__file__; sys.exit(main(sys.argv[1:]))"]  # fmt: skip
    done = subprocess.run([*command, *arguments], cwd=site.parent, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"FAILED from the wheel: perilune {' '.join(arguments)}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(arguments: list[str]) -> int:
    wheel = Path(arguments[0]).resolve()
    missing = missing_files(wheel)
    if missing:
        print(f"FAILED {wheel.name} lacks {len(missing)} files of the package: {missing[:10]}")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        print(run_from(site, "--version").strip())
        run_from(site, "inspect", "--preset", "tiny", "--json")
        demo = json.loads(run_from(site, "demo", "--steps", "24", "--json"))
        report = (site.parent / demo["report"]).read_text(encoding="utf-8")
        if (
            demo["train"]["steps"] != 24
            or demo["serve"]["cached_tokens_second_turn"] < 1
            or "plotly" not in report.lower()
        ):
            print(
                f"FAILED the demo from the wheel: {demo['train']}, {demo['serve']}, report of {len(report)} characters"
            )
            return 1
    print(f"{wheel.name}: {len(zipfile.ZipFile(wheel).namelist())} files, runs away from the source tree")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
