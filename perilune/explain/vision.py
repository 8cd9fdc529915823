"""MoonViT-V2: how a picture becomes rows of the text model, computed from a drawn picture and a small tower."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from perilune.config.model import VisionConfig
from perilune.data.image import ImageProcessorConfig, resize_plan
from perilune.data.image.pixels import composite, patchify
from perilune.errors import RequestError
from perilune.explain.chart import Bars, Heatmap
from perilune.explain.explanation import Explanation
from perilune.explain.subject import Subject
from perilune.model import ImageBatch, Transformer, init_weights
from perilune.model.vision.positions import frame_code, grid_angles, rotate
from perilune.ops.packed_attention import packed_attention_reference

TOWER = VisionConfig(hidden_size=64, num_layers=2, num_heads=2, head_dim=32, mlp_size=128, position_grid=8)
ROWS, COLUMNS = 6, 8  # patches of the drawn picture
REACH = 12
SIZES = ((225, 223), (1024, 768), (1920, 1080), (4000, 3000), (10000, 100))


class Frame:
    """A drawn picture, or a clip of several, as the tower takes it."""

    def __init__(self, pixels: list[np.ndarray], cfg: ImageProcessorConfig) -> None:
        self.patches = torch.cat([patchify(each, cfg) for each in pixels])
        self.grid = (len(pixels), ROWS, COLUMNS)


def explain(subject: Subject) -> Explanation:
    """Tokens by size; background, time code and eps at work; where one patch looks; how rotation fades with distance."""
    model, vision = with_tower(subject)
    cfg = ImageProcessorConfig(patch_size=vision.patch_size, merge=vision.merge)
    drawn = drawing(vision.patch_size)
    board, white = composite(drawn), on_white(drawn)
    still = Frame([board], cfg)
    clip = Frame([composite(drawing(vision.patch_size, shift=3 * i)) for i in range(2)], cfg)
    sizes = {f"{w} x {h}": resize_plan(w, h, ImageProcessorConfig()).tokens for w, h in SIZES}
    rows = image_rows(model, [still])
    background = change(rows, image_rows(model, [Frame([white], cfg)]))
    packed = change(torch.cat([rows, image_rows(model, [clip])]), image_rows(model, [still, clip]))
    coarse = Transformer(replace(model.cfg, vision=replace(vision, norm_eps=2**-7))).eval()
    coarse.load_state_dict(model.state_dict())
    eps = change(rows, image_rows(coarse, [still]))
    looks = attention_of(model, clip, patch=ROWS // 2 * COLUMNS + COLUMNS // 2)
    other = float(looks[1].sum())
    same = Frame([board] * 4, cfg)
    codes = time_difference(model, still, same)
    kernel = rotation_kernel(vision.head_dim)
    lightness = composite(drawn).mean(axis=2)
    step = max(1, lightness.shape[1] // 56)
    shown = lightness[::step, ::step]
    return Explanation(
        name="vision",
        title="MoonViT-V2 and its projector",
        source="K3 report §2.4; sizes and positions from the released checkpoint's tensors",
        formula=(
            "x = W_patch · patch + table(row, column)  [+ code(frame) if there are several frames]",
            "x += W_o Attn(Norm(x));  x += W_1 gelu(W_0 Norm(x))      attention over all patches of all frames of one item",
            "q, k: channel pair 2i turned by column · f_i, pair 2i+1 by row · f_i,  f_i = 10000^(−4i/K)",
            "row = Norm( W_2 gelu( W_0 [2 x 2 patches, mean over frames] ) )     replaces an embedding row",
        ),
        unusual=(
            "Trained from scratch under next-token loss: no contrastive stage, no frozen tower.",
            "One pass of attention over space and time: up to four frames are one sequence, and cost the tokens of one.",
            "A single image gets no time code at all, not even that of frame 0.",
            "Transparent pixels lie on a chessboard of the size that the model sees: white would be another picture.",
            "The norms' eps is that of the number format, so bf16 and fp32 runs of one tower differ unless it is pinned.",
        ),
        reference=packed_attention_reference,
        findings=[
            f"The picture's {ROWS * COLUMNS} patches become {len(rows)} rows; so do the {4 * ROWS * COLUMNS} patches of four frames.",
            f"Four equal frames differ from the image by the time code alone (to {codes:.1e}).",
            f"White instead of the chessboard changes the rows by {background:.0%} of their largest value.",
            f"Pinning eps at 2^-7, the bf16 value, changes the fp32 rows by {eps:.2g} of their largest value.",
            f"A patch of the first of two frames spends {other:.0%} of its attention on the second.",
            f"Packed with another item, the rows change by {packed:.1e}: items do not see each other.",
            *(
                ["This tower is seeded, not trained: add --run NAME of a run with vision."]
                if not subject.trained
                else []
            ),
        ],
        numbers={
            "tokens_by_size": sizes,
            "image_rows": len(rows),
            "clip_rows": len(image_rows(model, [same])),
            "background_change": background,
            "eps_change": eps,
            "packed_difference": packed,
            "time_code_difference": codes,
            "other_frame_share": other,
            "rotation_at_origin": float(kernel[REACH, REACH]),
            "rotation_far": float(kernel[0, 0]),
        },
        charts=[
            Heatmap(
                title="The drawn picture as the tower sees it",
                frames=[("", shown)],
                rows=[str(i * step) for i in range(shown.shape[0])],
                columns=[str(i * step) for i in range(shown.shape[1])],
                x_label="pixel",
                y_label="pixel",
                value_label="lightness",
                limits=(0.0, 255.0),
                caption="A disc on a transparent ground: the ground is the chessboard, and it is part of the picture.",
            ),
            Heatmap(
                title="Where one patch of the first frame looks (first block, mean over heads)",
                frames=[(f"frame {i}", looks[i].numpy()) for i in range(len(looks))],
                rows=[str(i) for i in range(ROWS)],
                columns=[str(i) for i in range(COLUMNS)],
                x_label="column of patches",
                y_label="row of patches",
                value_label="share",
                caption="Both frames get a share: one softmax runs over space and time together.",
            ),
            Heatmap(
                title="What rotation leaves of a match, by distance",
                frames=[("", kernel)],
                rows=[str(i) for i in range(-REACH, REACH + 1)],
                columns=[str(i) for i in range(-REACH, REACH + 1)],
                x_label="columns apart",
                y_label="rows apart",
                value_label="mean cosine",
                caption="Equal query and key score highest in place; rows and columns fade alike, and only the offset counts.",
            ),
            Bars(
                title="Tokens by size of the upload",
                categories=list(sizes),
                groups=[("tokens", [float(count) for count in sizes.values()])],
                y_label="tokens",
                y_log=True,
                caption="28 x 28 pixels are one token; only uploads above about 12.8 million pixels or 7168 a side shrink.",
            ),
        ],
        next=("perilune inspect --preset k3", "perilune explain mla"),
    )


def with_tower(subject: Subject) -> tuple[Transformer, VisionConfig]:
    """The run's model, or the seeded one with a small tower added.

    Raises:
        RequestError: the run has no vision tower.
    """
    if subject.cfg.vision is not None:
        return subject.model, subject.cfg.vision
    if subject.trained:
        raise RequestError(
            f"{subject.label} has no vision tower (model.vision is not set); name another --run, or none"
        )
    model = init_weights(Transformer(replace(subject.cfg, vision=TOWER)), subject.seed)
    return model.eval(), TOWER


def drawing(patch: int, shift: int = 0) -> np.ndarray:
    """A shaded disc on a transparent ground, uint8 `[ROWS·patch, COLUMNS·patch, 4]`, moved right by `shift` pixels."""
    y, x = np.mgrid[: ROWS * patch, : COLUMNS * patch]
    radius = np.hypot(y - ROWS * patch / 2, x - shift - COLUMNS * patch / 2) / (ROWS * patch / 3)
    pixels = np.zeros((*x.shape, 4), np.uint8)
    pixels[..., 0] = np.clip(230 * (1.2 - radius), 0, 255)
    pixels[..., 2] = 90
    pixels[..., 3] = np.where(radius < 1, 255, 0)
    return pixels


def on_white(rgba_HWC: np.ndarray) -> np.ndarray:
    """The same picture with white where it is transparent (its alpha is 0 or 255)."""
    return np.where(rgba_HWC[..., 3:] > 0, rgba_HWC[..., :3], np.uint8(255))


@torch.no_grad()
def image_rows(model: Transformer, items: list[Frame]) -> Tensor:
    """Rows that enter the text model, `[N, D]`."""
    return model.image_rows(ImageBatch.collate(items, []))


def change(before: Tensor, after: Tensor) -> float:
    """Largest difference over largest value."""
    return float((after - before).abs().max() / before.abs().max())


@torch.no_grad()
def time_difference(model: Transformer, still: Frame, clip: Frame) -> float:
    """How far the embedded clip of equal frames is from the embedded image plus the time code."""
    embed = model.vision_tower.patch_embed
    image, frames = embed(still.patches, [still.grid]), embed(clip.patches, [clip.grid])
    expected = image[None] + frame_code(clip.grid[0], image.shape[-1])[:, None]
    return float((frames.view_as(expected) - expected).abs().max())


@torch.no_grad()
def attention_of(model: Transformer, item: Frame, patch: int) -> Tensor:
    """Attention of one patch of the first block, mean over heads, `[frames, ROWS, COLUMNS]`."""
    vision, tower = model.cfg.vision, model.vision_tower
    assert vision is not None, "explained models have vision"
    block = tower.encoder.blocks[0]
    x_PD = tower.patch_embed(item.patches, [item.grid])
    rotation = tower.encoder.rotation([item.grid], x_PD.dtype, x_PD.device)
    q, k, _ = block.wqkv(block.norm0(x_PD)).unflatten(-1, (3, vision.num_heads, vision.head_dim)).unbind(1)
    scores = torch.einsum("hk,phk->hp", rotate(q, *rotation)[patch], rotate(k, *rotation)) * vision.head_dim**-0.5
    return scores.softmax(-1).mean(0).view(item.grid)


def rotation_kernel(head_dim: int) -> np.ndarray:
    """Mean over channel pairs of the cosine of the angle between two patches, by rows and columns apart."""
    side = 2 * REACH + 1
    angle = grid_angles(side, side, head_dim, dtype=torch.float64).view(side, side, -1)
    return (angle - angle[REACH, REACH]).cos().mean(-1).numpy()
