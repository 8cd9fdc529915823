"""One decode step equals the training-time formulas written out, token after token, and both implementations agree."""

from __future__ import annotations

import pytest
import torch
from kda_cases import relative_error

from perilune.errors import ConfigError
from perilune.ops.choice import force
from perilune.ops.kda import chunk_kda
from perilune.ops.kda.decode import kda_decode_step, select
from perilune.ops.native.build import unavailable_reason

IMPLEMENTATIONS = ["torch"] + ([] if unavailable_reason("kda_decode") else ["native"])
SHAPES = [
    (1, 4, 64, 64, 4),
    (3, 2, 20, 36, 4),
    (2, 1, 8, 6, 3),
    (1, 2, 16, 16, 1),
    (2, 1, 5, 7, 6),
    (1, 1, 256, 256, 4),
]


def _weights(batch: int, heads: int, key_dim: int, value_dim: int, taps: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    channels = heads * (2 * key_dim + value_dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "conv_weight_XW": normal(channels, taps),
        "window_BXW1": normal(batch, channels, taps - 1),
        "A_log_H": 0.3 * normal(heads),
        "dt_bias": normal(heads * key_dim),
        "norm_weight_V": normal(value_dim),
        "state_BHVK": normal(batch, heads, value_dim, key_dim),
    }


def _token(batch: int, heads: int, key_dim: int, value_dim: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    channels = heads * (2 * key_dim + value_dim)
    shapes = {
        "qkv_BX": (batch, channels),
        "decay_logit_BHK": (batch, heads, key_dim),
        "beta_logit_BH": (batch, heads),
        "gate_BHV": (batch, heads, value_dim),
    }
    return {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}


def _numbers(heads: int, key_dim: int, lower_bound: float | None) -> dict[str, object]:
    return {
        "num_heads": heads,
        "key_dim": key_dim,
        "lower_bound": lower_bound,
        "scale": key_dim**-0.5,
        "norm_eps": 1e-5,
    }


def _by_sequence(
    weights: dict[str, torch.Tensor], tokens: list[dict[str, torch.Tensor]], lower_bound: float | None
) -> tuple:
    """The same tokens at once in float64: convolution by hand, `chunk_kda`, norm and gate."""
    w = {name: x.double() for name, x in weights.items()}
    batch, heads, value_dim, key_dim = w["state_BHVK"].shape
    qkv, decay, beta, gate = (torch.stack([t[name].double() for t in tokens], 1) for name in tokens[0])
    line = torch.cat([w["window_BXW1"].transpose(1, 2), qkv], 1)  # [B, W-1+T, X]
    taps = w["conv_weight_XW"].shape[1]
    mixed = sum(line[:, j : j + len(tokens)] * w["conv_weight_XW"][:, j] for j in range(taps))
    mixed = mixed * torch.sigmoid(mixed)
    q, k, v = mixed.split([heads * key_dim, heads * key_dim, heads * value_dim], -1)
    o, state = chunk_kda(
        *(x.unflatten(-1, (heads, -1)) for x in (q, k, v)), decay, beta, None, w["state_BHVK"], True, True, True, True,
        A_log=w["A_log_H"], dt_bias=w["dt_bias"], lower_bound=lower_bound, state_v_first=True,
    )  # fmt: skip
    o = o * (o.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w["norm_weight_V"] * torch.sigmoid(gate)
    return o.flatten(2), state, line[:, len(tokens) :].transpose(1, 2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_steps_equal_the_sequence(implementation: str, shape: tuple[int, ...], lower_bound: float | None) -> None:
    batch, heads, key_dim, value_dim, _ = shape
    weights = _weights(*shape)
    tokens = [_token(batch, heads, key_dim, value_dim, seed) for seed in range(6)]
    expected, state, window = _by_sequence(weights, tokens, lower_bound)
    addresses = weights["state_BHVK"].data_ptr(), weights["window_BXW1"].data_ptr()
    with force(implementation):
        assert select("cpu", torch.float32).implementation == implementation
        rows = [kda_decode_step(**token, **weights, **_numbers(heads, key_dim, lower_bound)) for token in tokens]
    assert relative_error(torch.stack(rows, 1), expected) < 3e-6
    assert relative_error(weights["state_BHVK"], state) < 1e-6, "updated in place"
    assert torch.equal(weights["window_BXW1"].double(), window)
    assert addresses == (weights["state_BHVK"].data_ptr(), weights["window_BXW1"].data_ptr())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_activations_with_either_window(implementation: str) -> None:
    shape = (2, 2, 16, 24, 4)
    for window_dtype in (torch.bfloat16, torch.float32):
        weights = _weights(*shape)
        weights["window_BXW1"] = weights["window_BXW1"].to(window_dtype)
        tokens = [{n: x.bfloat16() for n, x in _token(*shape[:4], seed).items()} for seed in range(3)]
        expected, state, window = _by_sequence(weights, tokens, -5.0)
        with force(implementation):
            rows = [kda_decode_step(**token, **weights, **_numbers(2, 16, -5.0)) for token in tokens]
        assert rows[0].dtype == torch.bfloat16
        assert relative_error(torch.stack(rows, 1), expected) < 4e-3
        assert relative_error(weights["state_BHVK"], state) < 1e-6
        assert torch.equal(weights["window_BXW1"].double(), window)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slices_of_a_fused_projection(implementation: str) -> None:
    batch, heads, key_dim, value_dim, taps = shape = (3, 2, 16, 24, 4)
    token = _token(batch, heads, key_dim, value_dim, 0)
    fused = torch.cat([x.flatten(1) for x in token.values()], 1)
    widths = [x[0].numel() for x in token.values()]
    views = {n: part.view(x.shape) if x.dim() == 2 else part.unflatten(1, x.shape[1:])
             for (n, x), part in zip(token.items(), fused.split(widths, 1), strict=True)}  # fmt: skip
    first, second = _weights(*shape), _weights(*shape)
    with force(implementation):
        a = kda_decode_step(**token, **first, **_numbers(heads, key_dim, -5.0))
        b = kda_decode_step(**views, **second, **_numbers(heads, key_dim, -5.0))
    assert torch.equal(a, b) and torch.equal(first["state_BHVK"], second["state_BHVK"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_are_independent_and_nan_stays_in_its_row_and_head(implementation: str) -> None:
    shape = (3, 2, 16, 24, 4)
    token, weights, clean = _token(*shape[:4], 0), _weights(*shape), _weights(*shape)
    poisoned = {n: x.clone() for n, x in token.items()}
    poisoned["decay_logit_BHK"][1, 1, 3] = float("nan")
    with force(implementation):
        good = kda_decode_step(**token, **clean, **_numbers(2, 16, -5.0)).view(3, 2, 24)
        bad = kda_decode_step(**poisoned, **weights, **_numbers(2, 16, -5.0)).view(3, 2, 24)
    assert torch.isnan(bad[1, 1]).all()
    bad[1, 1] = good[1, 1]
    assert torch.equal(bad, good)


def test_float64_takes_the_torch_form() -> None:
    assert select("cpu", torch.float64).implementation == "torch"
    shape = (1, 2, 8, 6, 4)
    weights = {n: x.double() for n, x in _weights(*shape).items()}
    tokens = [{n: x.double() for n, x in _token(*shape[:4], 0).items()}]
    expected, state, _ = _by_sequence(weights, tokens, -5.0)
    o = kda_decode_step(**tokens[0], **weights, **_numbers(2, 8, -5.0))
    assert o.dtype == torch.float64
    assert relative_error(o, expected[:, 0]) < 1e-12 and relative_error(weights["state_BHVK"], state) < 1e-12


def test_many_heads_run_on_several_threads_with_the_same_bits() -> None:
    shape = (4, 8, 128, 128, 4)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            weights = _weights(*shape)
            o = kda_decode_step(**_token(*shape[:4], 0), **weights, **_numbers(8, 128, -5.0))
            results.append((o, weights["state_BHVK"]))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_misuse_is_refused() -> None:
    shape = (1, 2, 8, 6, 4)
    token, weights = _token(*shape[:4], 0), _weights(*shape)
    with pytest.raises(ConfigError, match="44 channels.*3 heads"):
        kda_decode_step(**token, **weights, **_numbers(3, 8, -5.0))
    wrong = weights | {"state_BHVK": weights["state_BHVK"].transpose(-1, -2)}
    with pytest.raises(ConfigError, match=r"\(1, 2, 8, 6\).*\(1, 2, 6, 8\)"):
        kda_decode_step(**token, **wrong, **_numbers(2, 8, -5.0))
    with pytest.raises(ConfigError, match="A_log"):
        kda_decode_step(**token, **(weights | {"A_log_H": None}), **_numbers(2, 8, None))
