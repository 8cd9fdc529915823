"""The vision tower and projector as loops over numbers in float64, written from the formulas alone."""

import math

import numpy as np


def _norm(x, weight, eps):
    return x / math.sqrt(float(np.mean(x * x)) + eps) * weight


def _bilinear(table, y, x, height, width):
    """Value of the table at the centre of cell (y, x) of a height x width grid laid over it."""
    side = table.shape[0]
    row = max((y + 0.5) * side / height - 0.5, 0.0)
    column = max((x + 0.5) * side / width - 0.5, 0.0)
    top, left = min(int(row), side - 1), min(int(column), side - 1)
    bottom, right = min(top + 1, side - 1), min(left + 1, side - 1)
    a, b = row - top, column - left
    upper = (1 - b) * table[top, left] + b * table[top, right]
    lower = (1 - b) * table[bottom, left] + b * table[bottom, right]
    return (1 - a) * upper + a * lower


def _turn(vector, x, y):
    """Rotate adjacent channel pairs, alternately by the column and by the row."""
    out = vector.copy()
    channels = len(vector)
    for pair in range(channels // 2):
        frequency = 10000.0 ** (-4 * (pair // 2) / channels)
        angle = (x if pair % 2 == 0 else y) * frequency
        turned = complex(vector[2 * pair], vector[2 * pair + 1]) * complex(math.cos(angle), math.sin(angle))
        out[2 * pair], out[2 * pair + 1] = turned.real, turned.imag
    return out


def _gelu_tanh(v):
    return 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


def _gelu_erf(v):
    return 0.5 * v * (1 + math.erf(v / math.sqrt(2)))


def tower_item(weights, vision, patches, grid, eps):
    """Features `[t·h·w, D]` of one item; `weights` maps published names to arrays."""
    t, h, w = grid
    width, heads, dim = vision.hidden_size, vision.num_heads, vision.head_dim
    table = weights["vision_tower.patch_embed.pos_emb.weight"]
    kernel = weights["vision_tower.patch_embed.proj.weight"]
    places = [(frame, y, x) for frame in range(t) for y in range(h) for x in range(w)]
    rows = []
    for patch, (frame, y, x) in zip(patches, places, strict=True):
        row = np.array([float(np.sum(kernel[out] * patch)) for out in range(width)]) + _bilinear(table, y, x, h, w)
        if t > 1:
            for i in range(width // 2):
                angle = frame * 10000.0 ** (-i / (width // 2))
                row[i] += math.sin(angle)
                row[width // 2 + i] += math.cos(angle)
        rows.append(row)
    for block in range(vision.num_layers):
        at = f"vision_tower.encoder.blocks.{block}."
        mixed = [weights[f"{at}wqkv.weight"] @ _norm(row, weights[f"{at}norm0.weight"], eps) for row in rows]
        per_head = [m.reshape(3, heads, dim) for m in mixed]
        out = np.zeros((len(rows), heads * dim))
        for head in range(heads):
            turned = [
                (_turn(m[0, head], x, y), _turn(m[1, head], x, y))
                for m, (_, y, x) in zip(per_head, places, strict=True)
            ]
            for i, (query, _) in enumerate(turned):
                scores = np.array([query @ key for _, key in turned]) / math.sqrt(dim)
                share = np.exp(scores - scores.max())
                share /= share.sum()
                out[i, head * dim : (head + 1) * dim] = sum(
                    s * m[2, head] for s, m in zip(share, per_head, strict=True)
                )
        for i, row in enumerate(rows):
            rows[i] = row = row + weights[f"{at}wo.weight"] @ out[i]
            inner = weights[f"{at}mlp.fc0.weight"] @ _norm(row, weights[f"{at}norm1.weight"], eps)
            rows[i] = row + weights[f"{at}mlp.fc1.weight"] @ np.array([_gelu_tanh(v) for v in inner])
    last = weights["vision_tower.encoder.final_layernorm.weight"]
    return np.stack([_norm(row, last, eps) for row in rows])


def projector_item(weights, vision, features, grid):
    """Rows `[(h/m)(w/m), text width]` of one item."""
    t, h, w = grid
    m = vision.merge
    rows = []
    for top in range(0, h, m):
        for left in range(0, w, m):
            parts = []
            for y in range(top, top + m):
                for x in range(left, left + m):
                    parts.append(sum(features[(frame * h + y) * w + x] for frame in range(t)) / t)
            inner = weights["mm_projector.proj.0.weight"] @ np.concatenate(parts)
            out = weights["mm_projector.proj.2.weight"] @ np.array([_gelu_erf(v) for v in inner])
            rows.append(_norm(out, weights["mm_projector.post_norm.weight"], 1e-5))
    return np.stack(rows)
