"""The answer to "how does this work?": words, a pointer to the defining code, numbers, and charts."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perilune.explain.chart import Chart


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One mechanism, explained on one model.

    Attributes:
        source: section of the K3 report that defines it.
        formula: lines of plain Unicode, with the symbols of the code.
        unusual: what differs from the common practice, one sentence each.
        reference: the function that defines it.
        findings: what the computed numbers say, one sentence each.
        numbers: the same, for machines.
        next: commands worth typing next.
    """

    name: str
    title: str
    source: str
    formula: Sequence[str]
    unusual: Sequence[str]
    reference: Callable[..., Any]
    findings: Sequence[str]
    numbers: dict[str, Any]
    charts: Sequence[Chart]
    next: Sequence[str] = field(default=())


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """Where a function is, and its code without the docstring."""

    file: str
    line: int
    code: str


def excerpt(function: Callable[..., Any], lines: int = 24) -> Excerpt:
    """The first `lines` lines of the source of `function` as it runs here, without its docstring."""
    function = inspect.unwrap(function)
    source, start = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(source))).body[0]
    assert isinstance(tree, (ast.FunctionDef, ast.ClassDef)), f"{function} is not a function or class"
    skip: set[int] = set()
    first = tree.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        skip = set(range(first.lineno - 1, first.end_lineno or first.lineno))
    kept = [line.rstrip() for number, line in enumerate(source) if number not in skip]
    shown = textwrap.dedent("\n".join(kept[:lines])) + ("\n    …" if len(kept) > lines else "")
    path = Path(inspect.getsourcefile(function) or "")
    root = Path(__file__).resolve().parents[2]
    name = str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
    return Excerpt(file=name, line=start, code=shown)
