"""The allocator keeps large blocks: their addresses come back instead of fresh pages."""

import sys

import pytest

from perilune.train.allocator import keep_large_blocks


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_is_accepted_and_harmless():
    assert keep_large_blocks() in (True, False)
    assert len(bytearray(1 << 26)) == 1 << 26


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_large_blocks() is False
