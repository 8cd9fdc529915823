"""How many pages an engine takes."""

import logging

import pytest
import torch

from perilune.config.presets import tiny
from perilune.serve.runner import pool_geometry
from perilune.serve.settings import EngineSettings

GEOMETRY = pool_geometry(tiny(), torch.float32, unit=4)


@pytest.mark.parametrize(("asked", "warns"), [(0, False), (10, True), (2**26, False)])
def test_a_pool_below_one_request_is_raised_and_says_so(asked, warns, caplog):
    with caplog.at_level(logging.WARNING):
        pages = EngineSettings(cache_bytes=asked).pages(GEOMETRY, 256, None)
    assert pages >= 2 * GEOMETRY.pages_for(256) and pages == max(pages, asked // GEOMETRY.page_bytes)
    assert warns == any(f"cache_bytes={asked} is less" in line and "256 tokens" in line for line in caplog.messages)


def test_without_a_wish_the_device_decides():
    settings = EngineSettings()
    assert settings.pages(GEOMETRY, 256, None) == 2**28 // GEOMETRY.page_bytes
    few = settings.pages(GEOMETRY, 256, 2**24)
    assert few == int(0.6 * 2**24) // GEOMETRY.page_bytes
    # Of a large device no more than 256 of the longest requests need.
    assert settings.pages(GEOMETRY, 256, 2**40) == 256 * (GEOMETRY.pages_for(256) + 4 * GEOMETRY.groups)
