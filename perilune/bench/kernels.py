"""Rows of `perilune bench kernels`: each operation against what one would write without it.

`OPS` is the registry: an operation's name to the function that lists its cases on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.bench import (
    gpu_accuracy,
    gpu_attnres,
    gpu_decode,
    gpu_experts,
    gpu_few_rows,
    gpu_generate,
    gpu_kda,
    gpu_mla,
    gpu_moe,
    gpu_muon,
    moe,
    mx,
)
from perilune.bench.elementwise import PEER as ELEMENTWISE_PEER
from perilune.bench.elementwise import cases as elementwise_cases
from perilune.bench.harness import Case, Measurable, Row, run_suite
from perilune.errors import ConfigError
from perilune.ops.choice import force
from perilune.ops.kda import chunk_kda, kda_decode_step, recurrent_kda_reference

CHUNK = 16  # rows of a chunk in the operation counts: what the bounded gate allows without inner tiles
IN_KERNEL = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
SHAPES = ((4, 512, 4, 64), (1, 2048, 8, 64), (2, 512, 2, 128))  # B, T, H, d
DECODE_SHAPES = ((1, 4, 64), (8, 4, 64), (1, 16, 128))  # B, H, d

DEVICES = ("cpu", "cuda")

CaseList = Callable[[str], Iterator[Measurable]]
OPS: dict[str, CaseList] = {}


def register(op: str) -> Callable[[CaseList], CaseList]:
    """Add the decorated function, device -> cases, to `OPS` under the name `op`."""

    def add(cases: CaseList) -> CaseList:
        assert op not in OPS, f"{op} is registered twice"
        OPS[op] = cases
        return cases

    return add


def run(
    device: str = "cpu",
    budget_seconds: float | None = None,
    ops: tuple[str, ...] | None = None,
    *,
    results: Path | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measure the rows of the operations `ops` (None = all).

    Args:
        device: "cpu" or "cuda".
        budget_seconds: stop between rows after this time.
        ops: names in `OPS`.
        results: a .jsonl file to continue from and to append to.
        on_row: called with each row as it is ready.

    Raises:
        ConfigError: an operation or the device is unknown, or the results file cannot be read.
    """
    chosen = tuple(OPS) if ops is None else ops
    unknown = [op for op in chosen if op not in OPS]
    if unknown:
        raise ConfigError(f"no benchmark of {unknown[0]!r}; known: {', '.join(OPS)}")
    if device not in DEVICES:
        raise ConfigError(f"device {device!r}; allowed: {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' asked for, but torch sees no CUDA device; use 'cpu'")
    cases = (case for op in chosen for case in OPS[op](device))
    return run_suite(cases, device=device, budget_seconds=budget_seconds, results=results, on_row=on_row)


def _kda_inputs(batch: int, length: int, heads: int, dim: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = dict.fromkeys(("q", "k", "v", "g"), (batch, length, heads, dim))
    shapes |= {"beta": (batch, length, heads), "A_log": (heads,), "dt_bias": (heads * dim,)}
    inputs = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    inputs["g"] -= 3.0  # half-lives from a few to a few hundred tokens, as in a trained layer
    return {name: x.to(device).requires_grad_() for name, x in inputs.items()}


def _kda_forward(op: Callable[..., Any], inputs: dict[str, Tensor]) -> Callable[[], Any]:
    def forward() -> Any:
        with torch.no_grad():
            return op(**inputs, lower_bound=-5.0, **IN_KERNEL)

    return forward


def _kda_training(op: Callable[..., Any], inputs: dict[str, Tensor]) -> Callable[[], Any]:
    v = inputs["v"]
    cotangent = torch.randn(v.shape, generator=torch.Generator().manual_seed(1)).to(v.device)

    def step() -> Any:
        o, _ = op(**inputs, lower_bound=-5.0, **IN_KERNEL)
        return torch.autograd.grad(o, list(inputs.values()), cotangent)

    return step


def _plain_chunks(**arguments: Any) -> Any:
    with force("torch"):
        return chunk_kda(**arguments)


@register("kda")
def kda_cases(device: str) -> Iterator[Case]:
    """KDA over whole sequences: against the token loop, and against the chunked form in plain torch; CPU only."""
    if device != "cpu":
        return
    peers = {"": ("token loop in plain torch", recurrent_kda_reference)}
    peers["_vs_chunked"] = ("chunked form in plain torch", _plain_chunks)
    for suffix, (peer_name, peer) in peers.items():
        for kind, timed in (("fwd", _kda_forward), ("fwdbwd", _kda_training)):
            for batch, length, heads, dim in SHAPES:
                rows = batch * length * heads
                forward_flops = rows * (6 * dim * dim + 6 * CHUNK * dim)
                backward_flops = rows * (16 * dim * dim + 22 * CHUNK * dim)
                forward_bytes, backward_bytes = 4 * rows * (5 * dim + 1), 4 * rows * (9 * dim + 2)
                training = kind == "fwdbwd"

                def make(
                    timed: Callable[..., Any] = timed,
                    peer: Callable[..., Any] = peer,
                    sizes: tuple[int, ...] = (batch, length, heads, dim),
                ) -> tuple[Callable[[], Any], Callable[[], Any]]:
                    inputs = _kda_inputs(*sizes, device)
                    return timed(chunk_kda, inputs), timed(peer, inputs)

                yield Case(
                    name=f"kda_{kind}_B{batch}_T{length}_H{heads}_d{dim}{suffix}",
                    shape=f"B={batch} T={length} H={heads} K=V={dim} float32",
                    make=make,
                    peer=peer_name,
                    flops=forward_flops + (backward_flops if training else 0),
                    bytes=forward_bytes + (backward_bytes if training else 0),
                )


@register("kda_decode")
def kda_decode_cases(device: str) -> Iterator[Case]:
    """One token of a KDA mixer with its convolution, norms and gates, against the same in plain torch; CPU only."""
    if device != "cpu":
        return
    for batch, heads, dim in DECODE_SHAPES:
        channels, taps = 3 * heads * dim, 4

        def make(
            batch: int = batch, heads: int = heads, dim: int = dim, channels: int = channels, taps: int = taps
        ) -> tuple[Callable[[], Any], Callable[[], Any]]:
            generator = torch.Generator().manual_seed(0)
            shapes = [(batch, channels), (channels, taps), (batch, channels, taps - 1), (batch, heads, dim), (heads,)]
            shapes += [(heads * dim,), (batch, heads), (batch, heads, dim), (dim,), (batch, heads, dim, dim)]
            inputs = [torch.randn(*shape, generator=generator).to(device) for shape in shapes]
            numbers = {"num_heads": heads, "key_dim": dim, "lower_bound": -5.0, "scale": dim**-0.5, "norm_eps": 1e-5}

            def ours() -> Tensor:
                return kda_decode_step(*inputs, **numbers)

            def peer() -> Tensor:
                with force("torch"):
                    return kda_decode_step(*inputs, **numbers)

            return ours, peer

        yield Case(
            name=f"kda_decode_B{batch}_H{heads}_d{dim}",
            shape=f"B={batch} H={heads} K=V={dim} W={taps} float32",
            make=make,
            peer="plain torch",
            bytes=4 * (2 * batch * heads * dim * dim + channels * taps + batch * channels * 2 * taps),
        )


@register("elementwise")
def row_operations(device: str) -> Iterator[Case]:
    """Norms, short convolution, gated units, attention over depth, cross-entropy: CPU only."""
    if device != "cpu":
        return
    for case in elementwise_cases():
        for kind, timed in (("fwd", case.forward), ("fwdbwd", case.forward_backward)):

            def make(
                case: Any = case, timed: Callable[..., Any] = timed
            ) -> tuple[Callable[[], Any], Callable[[], Any]]:
                inputs = case.inputs()
                return timed(case.ours, inputs), timed(case.peer, inputs)

            yield Case(
                name=f"{case.name}_{kind}",
                shape=case.shape,
                make=make,
                peer=ELEMENTWISE_PEER,
                flops=case.forward_flops * (3 if kind == "fwdbwd" else 1),
                bytes=case.forward_bytes + (case.backward_bytes if kind == "fwdbwd" else 0),
            )


def _on_gpu(cases: Callable[[], Iterator[Measurable]]) -> CaseList:
    """Cases that only a GPU has."""
    return lambda device: cases() if device == "cuda" else iter(())


OPS.update(moe.OPS)
OPS.update(mx.OPS)
OPS |= {
    "kda_gpu": _on_gpu(gpu_kda.cases),
    "kda_softplus_gpu": _on_gpu(gpu_kda.softplus_cases),
    "kda_accuracy_gpu": _on_gpu(gpu_accuracy.cases),
    "kda_decode_gpu": _on_gpu(gpu_decode.cases),
    "depth_gpu": _on_gpu(gpu_attnres.cases),
    "moe_gpu": _on_gpu(gpu_moe.cases),
    "experts_gpu": _on_gpu(gpu_experts.cases),
    "few_rows_gpu": _on_gpu(gpu_few_rows.cases),
    "mla_gpu": _on_gpu(gpu_mla.cases),
    "muon_gpu": _on_gpu(gpu_muon.cases),
    "generate_gpu": _on_gpu(gpu_generate.cases),
}
