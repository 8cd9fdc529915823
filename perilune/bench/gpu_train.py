"""Rows of `perilune bench train --device cuda`: a bf16 training step of `small` and `mini`.

Ours is the step that `perilune train` does, recorded as CUDA graphs. Against transformers' kimi_linear on fla-core's kernels
both sides hold the same weights in the Kimi-Linear form of the preset, and do a forward pass, a backward pass and a fused AdamW
step without any clipping. The K3-shaped presets with per-head Muon, quantile balancing, gradient and QK-clipping have no peer. A row's bound is its operations at the measured matmul rate; its `extra` has bound / time, which
is the model's FLOP utilisation (`mfu`), tokens a second, and peak memory beyond weights and optimizer state.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from perilune.bench.harness import Case, Row, matmul_ceiling, peak_bytes
from perilune.bench.kimi_linear import import_peer, kimi_linear_shaped, pair, random_ids
from perilune.bench.train import peer_step
from perilune.config import ModelConfig, OptimConfig
from perilune.config.presets import preset
from perilune.config.published import publish, to_json
from perilune.data.loader import Batch
from perilune.errors import ConfigError
from perilune.model import Transformer, init_weights
from perilune.optim.build import Optimizer
from perilune.shapes.flops import train_flops_per_token
from perilune.train.recorded import WARM_UP, Steps
from perilune.train.step import Step

BATCHES = {"small": (16, 2048), "mini": (4, 4096)}  # rows, tokens


def _require_fla() -> None:
    """Without fla-core the peer would run token loops in plain torch, and the ratio would say nothing.

    Raises:
        ConfigError: fla-core is not installed.
    """
    try:
        import fla  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "on a GPU the peer needs flash-linear-attention's kernels: pip install fla-core, or --peer none"
        ) from error


def peer_once(name: str, length: int) -> None:
    """One step of the peer in the preset's shape, as short and shallow as runs the same kernels: for `precompile`."""
    transformers = import_peer()
    whole = kimi_linear_shaped(preset(name))
    cfg = replace(whole, num_layers=2)  # the last layer has latent attention, the one before it KDA
    model = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig.from_dict(to_json(publish(cfg)))).cuda()
    ids = random_ids(cfg, 1, length + 1).cuda()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        model.eval()(ids, use_cache=False)
    peer_step(model, torch.bfloat16, ids)()


@dataclass(frozen=True, kw_only=True)
class TrainCase(Case):
    """A training step.

    Attributes:
        tokens: of a step.
    """

    tokens: int

    def measure(self, device: str, samples: int) -> Row:
        """As `Case.measure`."""
        row = super().measure(device, samples)
        best, extra = matmul_ceiling(device, self.dtype), dict(row.extra)
        for prefix, ms in (("", row.ours_ms), ("peer_", row.peer_ms)):
            if ms is not None:
                extra[f"{prefix}mfu"] = self.flops / (1e-3 * ms) / best
                extra[f"{prefix}tokens_per_second"] = self.tokens / (1e-3 * ms)
        return replace(row, extra=extra)


class RecordedStep:
    """Our training step on fixed ids `[B, T + 1]`, after those steps that come before a recording.

    Attributes:
        peak_bytes: of memory in a step that ran as it is: replayed ones use the same, taken once.
    """

    def __init__(self, model: Transformer, optim: OptimConfig, ids_BT: Tensor) -> None:
        model.train().compute_dtype = torch.bfloat16
        optimizer = Optimizer(model.named_parameters(), model.cfg, optim, muon_dtype=torch.bfloat16)
        self._steps = Steps(Step(model, optimizer, grad_clip=optim.grad_clip, qk_clip=optim.qk_clip))
        ids_BT = ids_BT.cpu()
        self._batch = Batch(
            ids_BT[:, :-1].clone(), ids_BT[:, 1:].clone(), torch.zeros_like(ids_BT[:, 1:], dtype=torch.bool)
        )
        for _ in range(WARM_UP - 1):
            self()
        self.peak_bytes = peak_bytes(self)
        self()
        assert self._steps.reason is None, f"the step was not recorded: {self._steps.reason}"

    def __call__(self) -> float:
        """One step; its loss."""
        return self._steps.run([self._batch], 1.0).loss


def _case(
    name: str,
    cfg: ModelConfig,
    shape: tuple[int, int],
    optim: OptimConfig,
    words: str,
    precompile: tuple[str, ...] = (),
) -> TrainCase:
    batch, length = shape

    def make() -> tuple[Callable[[], Any], Callable[[], Any] | None]:
        gc.collect()  # the previous row's model
        torch.cuda.empty_cache()
        ids = random_ids(cfg, batch, length + 1).cuda()
        if precompile:
            ours, theirs = pair(cfg, device="cuda")
            return RecordedStep(ours, optim, ids), peer_step(theirs, torch.bfloat16, ids)
        return RecordedStep(init_weights(Transformer(cfg)).cuda(), optim, ids), None

    return TrainCase(
        name=f"train_step_bf16_{name}", shape=f"{words}, B{batch} T{length}", make=make, tokens=batch * length,
        peer="transformers kimi_linear on fla-core" if precompile else "",
        flops=batch * length * train_flops_per_token(cfg, length), dtype=torch.bfloat16, precompile=precompile,
    )  # fmt: skip


def cases(peer: str) -> Iterator[TrainCase]:
    """All rows.

    Args:
        peer: "transformers" or "none".

    Raises:
        ConfigError: unknown peer, or it lacks its kernels.
    """
    if peer not in ("transformers", "none"):
        raise ConfigError(f"unknown peer {peer!r}; allowed: transformers, none")
    if peer == "transformers":
        _require_fla()
    adamw = OptimConfig(name="adamw", lr_adamw=1e-4, grad_clip=0.0, qk_clip=0.0)
    for name, shape in BATCHES.items():  # first what needs no compilation of a peer
        yield _case(f"{name}_k3_muon", preset(name), shape, OptimConfig(), f"{name}, per-head Muon, quantile balancing")
    for name, shape in BATCHES.items():
        cfg, tasks = kimi_linear_shaped(preset(name)), (f"train:{name}",) if peer == "transformers" else ()
        yield _case(name, cfg, shape, adamw, f"{name} in Kimi-Linear's form, AdamW", tasks)
