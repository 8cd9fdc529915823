"""The evidence ledger is true: all 144 systems, and every 'works' row names code, a test and a way in that exist."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LEDGER = ROOT / "docs" / "evidence.md"
COLUMNS = ("id", "system", "state", "reach", "where", "test", "number", "kind")


def rows() -> list[dict[str, str]]:
    found = []
    for line in LEDGER.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and cells[0].isdigit():
            assert len(cells) == len(COLUMNS), line
            found.append(dict(zip(COLUMNS, cells, strict=True)))
    return found


ROWS = rows()
WORKING = [row for row in ROWS if row["state"] == "works"]
ids = [f"{row['id']}" for row in WORKING]


def links(cell: str) -> list[str]:
    return [label for label, _ in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", cell)]


def test_all_144_systems_once_and_in_order():
    assert [int(row["id"]) for row in ROWS] == list(range(1, 145))


def test_states_and_kinds_are_the_defined_words():
    for row in ROWS:
        assert row["state"] in ("works", "planned"), row
        assert row["kind"] in ("published", "measured", "guess", "–"), row
        assert (row["number"] == "–") == (row["kind"] == "–"), row
        if row["state"] == "planned":
            assert row["reach"] == row["where"] == row["test"] == "–" and row["kind"] != "measured", row


@pytest.mark.parametrize("row", WORKING, ids=ids)
def test_code_and_test_exist(row):
    code, tests = links(row["where"]), links(row["test"])
    assert code and tests, row
    for path in code:
        assert (ROOT / path).exists(), path
    for name in tests:
        path, _, function = name.partition("::")
        assert re.match(r"tests/.*test_\w+\.py$", path) and (ROOT / path).is_file(), path
        if function:
            defined = {n.name for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)}
            assert function in defined, name


@pytest.mark.parametrize("row", WORKING, ids=ids)
def test_a_verb_or_a_public_call_reaches_it(row):
    way = row["reach"].strip("`")
    if way.startswith("perilune "):
        assert way.split()[1] in verbs(), way
        return
    module, _, attribute = way.partition(":")
    target = importlib.import_module(module)
    for name in attribute.split("."):
        target = getattr(target, name)
    assert callable(target), way


_verbs: set[str] = set()


def verbs() -> set[str]:
    if not _verbs:
        done = subprocess.run([sys.executable, "-m", "perilune", "--help"], cwd=ROOT, capture_output=True, text=True)
        _verbs.update(re.findall(r"^  (\w+) +\w", done.stdout, flags=re.M))
    return _verbs
