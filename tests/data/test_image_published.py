"""preprocessor_config.json: the published settings, and what is refused."""

import json
from dataclasses import replace

import pytest

from perilune.config import DataConfig, TrainConfig, VisionConfig, VisionDataConfig
from perilune.config.presets import tiny
from perilune.data.image import ImageProcessorConfig
from perilune.data.image.published import FILE, SECTION, read_document, to_document
from perilune.data.image_input import image_processor
from perilune.errors import ConfigError

# architecture §1.4
PUBLISHED = {
    "in_patch_limit": 65536, "patch_size": 14, "merge_kernel_size": 2, "patch_limit_on_one_side": 512,
    "fixed_output_tokens": None, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    "in_patch_limit_each_frame": 16384, "sample_fps": 8.0, "temporal_merge_kernel_size": 4,
    "transparent_bg_config": {
        "pattern": "chessboard", "chessboard_square_size": 8, "chessboard_square_on_top_left": True,
        "chessboard_white_value": 255, "chessboard_gray_value": 180,
    },
    "transparent_bg_fill_stage": "after_resize",
}  # fmt: skip


def written(folder, **changes):
    path = folder / FILE
    path.write_text(json.dumps({"auto_map": {"AutoImageProcessor": "x"}, SECTION: PUBLISHED | changes}))
    return path


def test_the_defaults_are_the_published_settings(tmp_path):
    assert to_document(ImageProcessorConfig()) == {SECTION: PUBLISHED}
    assert read_document(written(tmp_path)) == ImageProcessorConfig()


def test_other_settings_survive(tmp_path):
    cfg = ImageProcessorConfig(in_patch_limit=900, patch_size=7, sample_fps=2.5, image_std=(0.25, 0.5, 1.0))
    (tmp_path / FILE).write_text(json.dumps(to_document(cfg)))
    assert read_document(tmp_path / FILE) == cfg


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"fixed_output_tokens": 64}, "fixed_output_tokens is 64; only None"),
        ({"transparent_bg_fill_stage": "before_resize"}, "'before_resize'; only 'after_resize'"),
        ({"transparent_bg_config": {"pattern": "white"}}, "transparent_bg_config"),
        ({"rotate": True}, "unknown settings: rotate"),
        ({"patch_size": "14"}, "'14' for patch_size"),
        ({"patch_size": 14.5}, "14.5 for patch_size"),
        ({"patch_size": True}, "True for patch_size"),
        ({"image_mean": 0.5}, "0.5 for image_mean"),
        ({"image_mean": [0.5, "x", 0.5]}, "image_mean"),
        ({"image_std": [0.5, 0.5, 0.0]}, "above 0"),
        ({"in_patch_limit": 0}, "at least 1"),
        ({"sample_fps": None}, "None for sample_fps"),
    ],
)
def test_what_cannot_be_done_is_refused(tmp_path, changes, says):
    with pytest.raises(ConfigError, match=says) as caught:
        read_document(written(tmp_path, **changes))
    assert FILE in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"media_proc_cfg": 3}', "null", "\xff"])
def test_what_is_no_document_is_refused(tmp_path, text):
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=SECTION):
        read_document(tmp_path / FILE)


def test_a_checkpoint_brings_its_limits_and_a_run_keeps_its_own(tmp_path):
    tower = VisionConfig(hidden_size=16, num_layers=1, num_heads=2, head_dim=8, mlp_size=32, patch_size=7)
    plain = TrainConfig(model=replace(tiny(), vision=tower))
    assert image_processor(plain, tmp_path).cfg.in_patch_limit == 65536, "there is no file"
    written(tmp_path, patch_size=7, in_patch_limit=100)
    assert image_processor(plain, tmp_path).cfg.in_patch_limit == 100
    trained = replace(plain, data=DataConfig(vision=VisionDataConfig(share=0.5, image_size=28)))
    assert image_processor(trained, tmp_path).cfg.in_patch_limit == 16
    written(tmp_path)
    with pytest.raises(ConfigError, match="patch_size is 14 there and 7 in the model"):
        image_processor(plain, tmp_path)
