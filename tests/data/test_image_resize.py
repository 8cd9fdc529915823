"""Sizes after resizing and padding: the published examples, another library's rule, and what must hold for every size."""

from __future__ import annotations

import ast
import importlib.util
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.data.image import ImageProcessorConfig, ResizePlan, resize_plan
from perilune.errors import ConfigError, RequestError

CFG = ImageProcessorConfig()
SIDES = st.one_of(st.integers(1, 600), st.integers(1, 40_000))


@pytest.mark.parametrize(
    "size, plan",
    [
        ((4000, 3000), ResizePlan(4000, 3000, 4004, 3024, (1, 216, 286), 15444)),
        ((10000, 100), ResizePlan(7168, 71, 7168, 84, (1, 6, 512), 768)),
        ((100, 100), ResizePlan(100, 100, 112, 112, (1, 8, 8), 16)),
        ((8000, 8000), ResizePlan(3586, 3586, 3612, 3612, (1, 258, 258), 16641)),
        ((225, 223), ResizePlan(225, 223, 252, 224, (1, 16, 18), 72)),
    ],
    ids=str,
)
def test_published_examples(size, plan):
    assert resize_plan(*size, CFG) == plan


@given(width=SIDES, height=SIDES)
def test_every_plan_keeps_the_limits(width, height):
    plan = resize_plan(width, height, CFG)
    assert 1 <= plan.new_w <= min(width, 7168) and 1 <= plan.new_h <= min(height, 7168), "never enlarged"
    assert plan.pad_w % 28 == plan.pad_h % 28 == 0
    assert 0 <= plan.pad_w - plan.new_w < 28 and 0 <= plan.pad_h - plan.new_h < 28
    assert plan.grid == (1, plan.pad_h // 14, plan.pad_w // 14) and max(plan.grid) <= 512
    assert plan.tokens == plan.pad_w // 28 * (plan.pad_h // 28)
    # The rule counts whole patches of the upload, so the resized image may pass L by what those counts left out.
    left_out = (width / 14 / max(1, width // 14)) * (height / 14 / max(1, height // 14))
    assert plan.new_w * plan.new_h <= 65536 * 14**2 * max(1.0, left_out) * (1 + 1e-9)


@given(width=SIDES, height=SIDES)
def test_turning_the_image_turns_the_plan(width, height):
    a, b = resize_plan(width, height, CFG), resize_plan(height, width, CFG)
    assert (a.new_w, a.new_h, a.pad_w, a.pad_h, a.tokens) == (b.new_h, b.new_w, b.pad_h, b.pad_w, b.tokens)


@pytest.fixture(scope="module")
def k25_rule():
    """The function alone, out of transformers' source: its module cannot be imported without torchvision."""
    spec = importlib.util.find_spec("transformers")
    path = Path(spec.origin).parent / "models/kimi_k25/image_processing_kimi_k25.py" if spec and spec.origin else None
    if path is None or not path.exists():
        pytest.skip("transformers with kimi_k25 is not installed")
    found = next(node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "navit_resize")
    names = {"math": math}
    exec(compile(ast.Module([found], []), str(path), "exec"), names)
    return names["navit_resize"]


@given(width=SIDES, height=SIDES, limit=st.sampled_from([4096, 16384, 65536]), side=st.sampled_from([64, 512]))
def test_equals_the_k25_rule_of_another_library(k25_rule, width, height, limit, side):
    cfg = replace(CFG, in_patch_limit=limit, patch_limit_on_one_side=side)
    (new_h, new_w), (pad_h, pad_w) = k25_rule(height, width, 14, 2, limit, side)
    assert resize_plan(width, height, cfg)[:4] == (new_w, new_h, pad_w, pad_h)


def test_frames_have_their_own_limit():
    image = resize_plan(4000, 3000, CFG)
    frame = resize_plan(4000, 3000, CFG, patch_limit=CFG.in_patch_limit_each_frame)
    assert frame == resize_plan(4000, 3000, replace(CFG, in_patch_limit=16384))
    assert frame.tokens * 3 < image.tokens


def test_empty_sizes_and_wrong_settings_are_refused():
    for size in ((0, 5), (5, 0), (-1, 5)):
        with pytest.raises(RequestError, match=f"{size[0]} x {size[1]} pixels; both sides must be at least 1"):
            resize_plan(*size, CFG)
    for change, words in (
        ({"patch_size": 0}, "patch_size=0"),
        ({"patch_limit_on_one_side": 511}, "multiple of image.merge=2"),
        ({"sample_fps": 0.0}, "sample_fps=0.0"),
        ({"sample_fps": float("inf")}, "sample_fps=inf"),
        ({"image_std": (0.5, 0.0, 0.5)}, "above 0"),
        ({"image_mean": (0.5, 0.5)}, "three numbers"),
        ({"max_pixels": 10**9}, "178956970"),
    ):
        with pytest.raises(ConfigError, match=words):
            replace(CFG, **change)
