"""The routed experts on a Hopper GPU: forward, and the backward that saves nothing but tokens and plan.

Forward, R routed rows: gather tokens; h = glu(x W1^T, x W3^T) in one kernel; y = p h W2^T; sum of each token's rows.
Backward, with dy the gathered gradient: gate and up again; d = dy W2; the gated unit's gradient and <h, d>, in place;
dW2 = dy^T (p h), dW1 = dgate^T x, dW3 = dup^T x; dx = dgate W1 + dup W3, summed into tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from triton.tools.tensor_descriptor import TensorDescriptor

from perilune.ops.moe.triton import products
from perilune.ops.moe.triton.configs import Config, Tiles, config
from perilune.ops.moe.triton.plan import RowPlan, row_plan
from perilune.ops.moe.triton.rows import gather, sum_rows, unit_gradient_
from perilune.ops.moe.triton.unit import Caps, unit_options
from perilune.ops.narrow import in_dtype
from perilune.ops.triton.available import units
from perilune.ops.triton.sizes import blocks


def obstacle(z_NL: Tensor, w1_EFL: Tensor) -> str | None:
    """Why the kernels cannot take experts of these sizes; None if they can."""
    if z_NL.is_cuda and torch.cuda.get_device_capability(z_NL.device) < (9, 0):
        return "the kernels of the routed experts copy tiles with an engine that begins with compute capability 9.0"
    for name, size in (("tokens", w1_EFL.shape[2]), ("hidden units", w1_EFL.shape[1])):
        if size * z_NL.element_size() % 16:
            return f"rows of {size} {name} are not whole 16-byte units"
    if type(w1_EFL) not in (Tensor, Parameter) or w1_EFL.device != z_NL.device:
        return f"weights are a {type(w1_EFL).__name__} on {w1_EFL.device}, not plain tensors on {z_NL.device}"
    if w1_EFL.dtype not in (z_NL.dtype, torch.float32):
        return f"weights are {w1_EFL.dtype}, tokens {z_NL.dtype}"
    return None


class RoutedExperts(torch.autograd.Function):
    """Arguments: tokens `[N, L]`, routes, mixing weights, the three stacks of weights, caps of SiTU (None = SwiGLU)."""

    @staticmethod
    def forward(ctx, z_NL, index_NA, weight_NA, w1_EFL, w3_EFL, w2_ELF, caps):
        ctx.caps = caps
        if not index_NA.numel():
            ctx.save_for_backward(z_NL, weight_NA, w1_EFL, w3_EFL, w2_ELF)
            ctx.plan = None
            return z_NL.new_zeros(z_NL.shape)
        tiles = config(z_NL.dtype, index_NA.numel(), len(w1_EFL))
        plan = row_plan(index_NA, len(w1_EFL), tiles.rows)
        x_RL = gather(z_NL, plan)
        h_RF = hidden(x_RL, *_matrices(z_NL.dtype, w1_EFL, w3_EFL), plan, tiles, caps)
        y_RL = down(h_RF, *_matrices(z_NL.dtype, w2_ELF), weight_NA, plan, tiles)
        ctx.save_for_backward(z_NL, weight_NA, w1_EFL, w3_EFL, w2_ELF, *plan[1:-1])
        ctx.plan = plan.tile, plan.active
        return sum_rows(y_RL, plan)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout_NL):
        z_NL, weight_NA, w1_EFL, w3_EFL, w2_ELF, *rest = ctx.saved_tensors
        if ctx.plan is None:
            zeros = (torch.zeros_like(t) for t in (weight_NA, w1_EFL, w3_EFL, w2_ELF))
            return torch.zeros_like(z_NL), None, *zeros, None
        plan = RowPlan(ctx.plan[0], *rest, ctx.plan[1])
        tiles = config(z_NL.dtype, len(plan.place_R), len(w1_EFL))
        w1, w3, w2 = _matrices(z_NL.dtype, w1_EFL, w3_EFL, w2_ELF)
        x_RL, dy_RL = gather(z_NL, plan), gather(dout_NL.to(z_NL.dtype), plan)
        gate_RF, up_RF = before_unit(x_RL, w1, w3, plan, tiles)
        d_RF = back([(dy_RL, w2)], plan, tiles)
        dweight_NA = unit_gradient_(gate_RF, up_RF, d_RF, _mixing(weight_NA), plan, ctx.caps)
        wanted = dict(zip(("z", "index", "weight", "w1", "w3", "w2"), ctx.needs_input_grad))
        dw2_ELF = weight_gradient(dy_RL, d_RF, w2_ELF, plan, tiles) if wanted["w2"] else None
        del dy_RL, d_RF
        dw1_EFL = weight_gradient(gate_RF, x_RL, w1_EFL, plan, tiles) if wanted["w1"] else None
        dw3_EFL = weight_gradient(up_RF, x_RL, w3_EFL, plan, tiles) if wanted["w3"] else None
        del x_RL
        dz_NL = sum_rows(back([(gate_RF, w1), (up_RF, w3)], plan, tiles), plan) if wanted["z"] else None
        return dz_NL, None, dweight_NA.to(weight_NA.dtype), dw1_EFL, dw3_EFL, dw2_ELF, None


def hidden(x_RL: Tensor, w1_EFL: Tensor, w3_EFL: Tensor, plan: RowPlan, tiles: Config, caps: Caps) -> Tensor:
    """glu(x W1^T, x W3^T) `[R', F]`."""
    h_RF = x_RL.new_empty(len(x_RL), w1_EFL.shape[1])
    _launch_glu(x_RL, w1_EFL, w3_EFL, (h_RF, None, None), plan, tiles, caps)
    return h_RF


def before_unit(x_RL: Tensor, w1_EFL: Tensor, w3_EFL: Tensor, plan: RowPlan, tiles: Config) -> tuple[Tensor, Tensor]:
    """x W1^T and x W3^T, `[R', F]` each."""
    gate_RF, up_RF = (x_RL.new_empty(len(x_RL), w1_EFL.shape[1]) for _ in range(2))
    _launch_glu(x_RL, w1_EFL, w3_EFL, (None, gate_RF, up_RF), plan, tiles, None)
    return gate_RF, up_RF


def _launch_glu(
    x_RL: Tensor, w1_EFL: Tensor, w3_EFL: Tensor, results: tuple, plan: RowPlan, tiles: Config, caps: Caps
) -> None:
    _, hidden_size, width = w1_EFL.shape
    rows, (columns, depth, *_) = tiles.rows, tiles.glu
    products.glu_kernel[_programs(plan, hidden_size, tiles.glu)](
        _tiled(x_RL, rows, depth), _tiled(w1_EFL, columns, depth), _tiled(w3_EFL, columns, depth),
        *(None if out is None else _tiled(out, rows, columns) for out in results), plan.expert_T, plan.start_E1,
        len(plan.count_E), L=width, F=hidden_size, BM=rows, BN=columns, BK=depth,
        **unit_options(caps), **_settings(x_RL, tiles.glu, tiles),
    )  # fmt: skip


def down(h_RF: Tensor, w2_ELF: Tensor, weight_NA: Tensor, plan: RowPlan, tiles: Config) -> Tensor:
    """p h W2^T `[R', L]`."""
    _, width, hidden_size = w2_ELF.shape
    y_RL = h_RF.new_empty(len(h_RF), width)
    rows, (columns, depth, *_) = tiles.rows, tiles.product
    products.down_kernel[_programs(plan, width, tiles.product)](
        _tiled(h_RF, rows, depth), _tiled(w2_ELF, columns, depth), _tiled(y_RL, rows, columns), _mixing(weight_NA),
        plan.slot_R, plan.expert_T, plan.start_E1, plan.count_E, len(plan.count_E), F=hidden_size, L=width, BM=rows,
        BN=columns, BK=depth, **_settings(h_RF, tiles.product, tiles),
    )  # fmt: skip
    return y_RL


def back(pairs: list[tuple[Tensor, Tensor]], plan: RowPlan, tiles: Config) -> Tensor:
    """The sum over one or two pairs of rows `[R', K]` times their expert's matrix of `[E, K, N]`: `[R', N]`."""
    (first, w), (second, v) = pairs[0], pairs[1] if len(pairs) > 1 else (None, None)
    _, depths, width = w.shape
    out_RN = first.new_empty(len(first), width)
    rows, (columns, depth, *_) = tiles.rows, tiles.product
    products.back_kernel[_programs(plan, width, tiles.product)](
        _tiled(first, rows, depth), _tiled(w, depth, columns), None if second is None else _tiled(second, rows, depth),
        None if v is None else _tiled(v, depth, columns), _tiled(out_RN, rows, columns), plan.expert_T, plan.start_E1,
        len(plan.count_E), K=depths, N=width, BM=rows, BN=columns, BK=depth,
        **_settings(first, tiles.product, tiles),
    )  # fmt: skip
    return out_RN


def weight_gradient(left_RM: Tensor, right_RN: Tensor, like_EMN: Tensor, plan: RowPlan, tiles: Config) -> Tensor:
    """left^T right over each expert's rows, `[E, M, N]` in the weight's dtype."""
    experts, rows, columns = like_EMN.shape
    out_EMN = torch.empty(like_EMN.shape, dtype=like_EMN.dtype, device=like_EMN.device)
    of = tiles.weights
    count = experts * blocks(rows, tiles.weight_rows) * blocks(columns, of.columns)
    products.weight_kernel[_at_most(count, left_RM, of)](
        _tiled(left_RM, of.depth, tiles.weight_rows), _tiled(right_RN, of.depth, of.columns),
        out_EMN, plan.start_E1, experts, TILE=plan.tile, M=rows, N=columns, BM=tiles.weight_rows, BN=of.columns, BK=of.depth,
        **_settings(left_RM, of, tiles),
    )  # fmt: skip
    return out_EMN


def _matrices(dtype: torch.dtype, *weights: Tensor) -> list[Tensor]:
    return [in_dtype(w, dtype).contiguous() for w in weights]


def _tiled(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A stack of matrices as one, for copies of tiles."""
    return TensorDescriptor.from_tensor(matrix.flatten(0, -2), [rows, columns])


def _mixing(weight_NA: Tensor) -> Tensor:
    return weight_NA.to(torch.float32).contiguous()


def _programs(plan: RowPlan, columns: int, of: Tiles) -> tuple[int]:
    return _at_most(len(plan.expert_T) * blocks(columns, of.columns), plan.slot_R, of)


def _at_most(count: int, on: Tensor, of: Tiles) -> tuple[int]:
    return (min(count, of.programs * units(on.device)) if of.programs else count,)


def _settings(rows: Tensor, of: Tiles, tiles: Config) -> dict[str, int | str]:
    precision = "tf32x3" if rows.dtype == torch.float32 else "tf32"
    return {"PRECISION": precision, "GROUP": tiles.group, "num_warps": of.warps, "num_stages": of.stages}
