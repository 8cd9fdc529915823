"""Every command and link of the README and the docs is true for this version; Python blocks run."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import run_readme

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.S | re.M)


def perilune_commands(text: str) -> list[str]:
    """Command lines of the program in bash and console blocks, and in `inline code`."""
    blocks = "\n".join(body.replace("\\\n", " ") for kind, body in BLOCK.findall(text) if kind in ("bash", "console"))
    lines = [re.sub(r"\s+#.*$", "", line).strip() for line in blocks.splitlines()]
    lines += re.findall(r"`((?:\.venv/bin/)?perilune [^`\n]+)`", BLOCK.sub("", text))
    return [line for line in lines if re.match(r"(\.venv/bin/)?perilune\s", line)]


@functools.cache
def help_of(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "perilune", *words, *([] if "--help-all" in words else ["--help"])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout + done.stderr if done.returncode == 0 else ""


def verbs() -> set[str]:
    return set(re.findall(r"^  (\w+) +\w", help_of(), flags=re.M))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_and_anchors_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for label, target in re.findall(r"!?\[([^\]]*)\]\(([^)\s]+)\)", BLOCK.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name}: [{label}]({target})"
        if anchor and linked.suffix == ".md":
            heads = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), flags=re.M)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{page.name}: no heading for {target}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_names_a_verb_and_options_that_exist(page):
    for line in perilune_commands(page.read_text(encoding="utf-8")):
        words = shlex.split(line.replace("…", ""))[1:]
        words = list(itertools.takewhile(lambda word: not re.match(r"\||&&|\d?>", word), words))
        while words and words[0] in ("-v", "-q"):
            words.pop(0)
        if words and words[0] in ("--help", "--version"):
            continue
        assert words and words[0] in verbs(), f"{page.name}: `{line}`: no such verb"
        missing = help_missing(help_of(words[0]), words)
        if missing and "--help-all" in help_of(words[0]):
            missing = help_missing(help_of(words[0], "--help-all"), missing)
        assert not missing, f"{page.name}: `{line}`: {words[0]} --help does not list {missing}"


def help_missing(shown: str, words: list[str]) -> list[str]:
    """Options of the command line that the help text does not mention."""
    options = [word.split("=")[0] for word in words if word.startswith("--")]
    return [
        option for option in options if option not in shown and option.replace("-", "_") not in shown.replace("-", "_")
    ]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_blocks_run(page, tmp_path):
    blocks = [body for kind, body in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == "python"]
    if blocks:
        environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(blocks)], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_commands_are_taken_from_bash_blocks_only():
    page = "```bash\nperilune a \\\n  --b 1  # why\n\n# only this\nperilune c\n```\n```console\nperilune d\n```\n"
    assert run_readme.commands(page) == ["perilune a    --b 1", "perilune c"]


def test_readme_says_the_two_commands_and_how_to_get_help():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for needed in (
        "python3 bootstrap.py demo",
        "python3 bootstrap.py test",
        "Apache-2.0",
        "docs/evidence.md",
        "independent",
    ):
        assert needed in text, needed
