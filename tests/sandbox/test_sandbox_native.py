"""Small C libraries: kept in the user's cache, compiled again when their source changes, done without where that cannot be."""

from __future__ import annotations

import ctypes
import shutil

import pytest

from perilune.sandbox import native


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    if shutil.which("cc") is None:
        pytest.skip("no compiler (apt-get install gcc libc6-dev)")
    monkeypatch.setenv("PERILUNE_SANDBOX_IMAGES", str(tmp_path / "cache"))
    monkeypatch.delenv("PERILUNE_NATIVE", raising=False)
    native.compiled.cache_clear()
    yield tmp_path / "cache"
    native.compiled.cache_clear()


def test_a_library_is_compiled_once_and_again_when_its_source_changes(tmp_path, cache):
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 42; }\n")
    first = native.compiled(source)
    assert first is not None and ctypes.CDLL(str(first)).answer() == 42
    native.compiled.cache_clear()
    made = first.stat().st_mtime_ns
    assert native.compiled(source) == first and first.stat().st_mtime_ns == made
    native.compiled.cache_clear()
    source.write_text("int answer(void) { return 43; }\n")
    second = native.compiled(source)
    assert second not in (None, first) and ctypes.CDLL(str(second)).answer() == 43
    assert sorted(cache.iterdir()) == sorted([first, second])


@pytest.mark.parametrize("why", ["source", "switch", "compiler", "folder"])
def test_without_one_there_is_none_and_nothing_is_left(tmp_path, cache, monkeypatch, why):
    source = tmp_path / "answer.c"
    source.write_text("no C\n" if why == "source" else "int answer(void) { return 42; }\n")
    if why == "switch":
        monkeypatch.setenv("PERILUNE_NATIVE", "0")
    elif why == "compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    elif why == "folder":
        cache.write_text("a file")
    assert native.compiled(source) is None
    assert why == "folder" or not cache.exists() or list(cache.iterdir()) == []
