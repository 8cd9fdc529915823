"""What `prepare` of the KDA kernels stands for, in float64, and inputs for it. Shared by the tests of its CUDA form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.ops.kda.gpu.forward import Prepared, Setting

CHUNK = 64


@dataclass
class Inputs:
    """Flattened: q, k `[tokens, H, K]`, g `[tokens, HV, K]`, beta `[tokens, HV]`, chunks int32 `[chunks, 2]`."""

    q: Tensor
    k: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    chunks: Tensor

    def to(self, device: str) -> Inputs:
        return Inputs(*(None if x is None else x.to(device) for x in vars(self).values()))


def inputs(lengths: tuple[int, ...] = (64, 37), qk_heads: int = 1, heads: int = 2, key_dim: int = 128) -> Inputs:
    """Random bfloat16 inputs whose sequences have these lengths, at most one chunk each."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tokens = sum(lengths)
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    return Inputs(
        normal(tokens, qk_heads, key_dim).bfloat16(),
        normal(tokens, qk_heads, key_dim).bfloat16(),
        (normal(tokens, heads, key_dim) - 1).bfloat16(),
        normal(tokens, heads).bfloat16(),
        0.3 * normal(heads),
        normal(heads * key_dim),
        torch.tensor(list(zip(starts, lengths, strict=True)), dtype=torch.int32),
    )


def setting(**changes: object) -> Setting:
    """The gate, the norm and the sigmoid in the kernel, bound -5."""
    given = {
        "scale": 128**-0.5, "l2_norm": True, "gate": 1, "lower_bound": -5.0, "bounded": True, "beta_sigmoid": True,
        "beta_scale": 1.0, "state_v_first": False, "final": False, "keep": False, "offsets": (0,),
    }  # fmt: skip
    return Setting(**(given | changes))


def expected(x: Inputs, s: Setting) -> Prepared:
    """The definition: docstring of ops/kda/triton/prepare.py."""
    heads, key_dim = x.g.shape[1:]
    parts = []
    for start, count in x.chunks.tolist():
        for head in range(heads):
            rows = slice(start, start + count)
            q, k, g = (torch.zeros(CHUNK, key_dim, dtype=torch.float64) for _ in "qkg")
            beta = torch.zeros(CHUNK, dtype=torch.float64)
            kv = head // (heads // x.q.shape[1])
            q[:count], k[:count] = x.q[rows, kv].double(), x.k[rows, kv].double()
            g[:count], beta[:count] = x.g[rows, head].double(), x.beta[rows, head].double()
            if s.gate:
                rate = 1.0 if x.A_log is None else float(x.A_log[head].double().exp())
                bias = 0.0 if x.dt_bias is None else x.dt_bias.view(heads, key_dim)[head].double()
                g[:count] += bias
                softplus = torch.nn.functional.softplus(g[:count], threshold=1e3)
                g[:count] = s.lower_bound * torch.sigmoid(rate * g[:count]) if s.gate == 1 else -rate * softplus
            if s.beta_sigmoid:
                beta[:count] = s.beta_scale * beta[:count].sigmoid()
            if s.l2_norm:
                q, k = (t * (t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k))
            q = q * s.scale
            G = g.cumsum(0)
            decay = torch.exp((G[:, None] - G[None]).clamp(max=0))
            L = torch.einsum("rk,ck,rck->rc", k, k, decay).tril(-1) * beta[:, None]
            A = torch.linalg.inv(torch.eye(CHUNK, dtype=torch.float64) + L)
            P = torch.einsum("rk,ck,rck->rc", q, k, decay).tril()
            parts.append((q * G.exp(), k * G.exp(), k * (G[-1] - G).exp(), P, A, G[-1].exp(), beta))
    return Prepared(*(torch.stack(p).unflatten(0, (-1, heads)) for p in zip(*parts, strict=True)))


def errors(got: Prepared, truth: Prepared) -> dict[str, float]:
    """Norm of the error beside the norm of the truth, by output."""
    return {
        name: float((x.cpu().double() - y).norm() / y.norm().clamp_min(1e-30))
        for name, x, y in zip(Prepared._fields, got, truth, strict=True)
    }
