"""Rows of `perilune bench train`: a training step and generation of a whole model.

Against transformers both sides hold the same Kimi-Linear-shaped model with the same weights (`bench.kimi_linear`), take
the same batch, and do the same: forward, backward and a fused AdamW step; or a prompt's prefill and greedy decoding. The
K3-shaped model with Muon has no peer and stands alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.bench.harness import Case, Row, run_suite
from perilune.bench.kimi_linear import SHAPE, import_peer, pair, random_ids
from perilune.config import ModelConfig, OptimConfig
from perilune.config.presets import nano
from perilune.errors import ConfigError
from perilune.model import Transformer, init_weights
from perilune.optim.build import Optimizer
from perilune.shapes.flops import forward_flops_per_token, train_flops_per_token
from perilune.train.allocator import keep_large_blocks

BATCH, LENGTH = 8, 256
PROMPT, NEW = 32, 64
PEERS = ("transformers", "none")
SAMPLES = 3  # the peer's step takes about ten seconds on two cores


@lru_cache(maxsize=1)
def _pair() -> tuple[Transformer, Any]:
    return pair(SHAPE)


def ours_step(model: Transformer, optim: OptimConfig, dtype: torch.dtype, ids_BT: Tensor) -> Callable[[], Any]:
    """Our training step on fixed ids `[B, T + 1]`: forward, backward, balancers, optimizer."""
    model.train()
    optimizer = Optimizer(model.named_parameters(), model.cfg, optim)

    def step() -> float:
        model.compute_dtype = dtype
        loss = model.loss(ids_BT[:, :-1], ids_BT[:, 1:])
        (loss.nats / loss.tokens).backward()
        for layer in model.moe_layers():
            layer.router.bias.copy_(layer.balancer.update(layer.router.bias))
        optimizer.step(1.0)
        optimizer.zero_grad()
        return float(loss.nats.detach())

    return step


def peer_step(model: Any, dtype: torch.dtype, ids_BT: Tensor) -> Callable[[], Any]:
    """The same of a transformers model, with its fused AdamW, under autocast where the dtype is not fp32."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    mixed = contextlib.nullcontext if dtype == torch.float32 else lambda: torch.autocast(ids_BT.device.type, dtype)

    def step() -> float:
        with mixed():
            # The same targets on both sides: position t predicts token t + 1 of the same window.
            loss = model(
                ids_BT[:, :-1], labels=ids_BT[:, :-1], shift_labels=ids_BT[:, 1:].contiguous(), use_cache=False
            ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


@torch.no_grad()
def _ours_generate(model: Transformer, prompt_BT: Tensor) -> Tensor:
    """Greedy continuation by NEW tokens, prefill included."""
    state = model.new_state(prompt_BT.shape[0], capacity=PROMPT + NEW)
    token = model(prompt_BT, state, logits="last").logits_BTZ[:, -1].argmax(-1, keepdim=True)
    drawn = [token]
    for _ in range(NEW - 1):
        token = model(token, state, logits="last").logits_BTZ[:, -1].argmax(-1, keepdim=True)
        drawn.append(token)
    return torch.cat(drawn, 1)


@torch.no_grad()
def _peer_generate(model: Any, prompt_BT: Tensor) -> Tensor:
    out = model.generate(
        prompt_BT, attention_mask=torch.ones_like(prompt_BT), max_new_tokens=NEW, min_new_tokens=NEW,
        do_sample=False, use_cache=True, pad_token_id=0,
    )  # fmt: skip
    return out[:, PROMPT:]


def _train_case(dtype: torch.dtype, word: str, with_peer: bool) -> Case:
    def make() -> tuple[Callable[[], Any], Callable[[], Any] | None]:
        ours, theirs = _pair() if with_peer else (init_weights(Transformer(SHAPE)), None)
        ids = random_ids(SHAPE, BATCH, LENGTH + 1)
        adamw = OptimConfig(name="adamw", lr_adamw=1e-4)
        return ours_step(ours, adamw, dtype, ids), None if theirs is None else peer_step(theirs, dtype, ids)

    return Case(
        name=f"train_step_{word}", shape=f"Kimi-Linear-shaped, 19 M parameters, B{BATCH} T{LENGTH}, AdamW", make=make,
        peer="transformers kimi_linear" if with_peer else "",
        flops=BATCH * LENGTH * train_flops_per_token(SHAPE, LENGTH),
    )  # fmt: skip


def _generate_case(batch: int, with_peer: bool) -> Case:
    def make() -> tuple[Callable[[], Any], Callable[[], Any] | None]:
        prompt = random_ids(SHAPE, batch, PROMPT, seed=batch)
        ours, theirs = _pair() if with_peer else (init_weights(Transformer(SHAPE)), None)
        ours.eval().compute_dtype = torch.float32
        if theirs is None:
            return lambda: _ours_generate(ours, prompt), None
        theirs.eval()
        a, b = _ours_generate(ours, prompt), _peer_generate(theirs, prompt)
        agree = float((a[:, :8] == b[:, :8]).float().mean())
        assert agree > 0.9, f"greedy tokens agree for only {agree:.0%}; nothing was timed"
        return lambda: _ours_generate(ours, prompt), lambda: _peer_generate(theirs, prompt)

    return Case(
        name=f"generate_b{batch}", shape=f"Kimi-Linear-shaped, batch {batch}, prompt {PROMPT}, {NEW} new tokens, greedy",
        make=make, peer="transformers generate with cache" if with_peer else "",
        flops=batch * (PROMPT + NEW) * forward_flops_per_token(SHAPE, PROMPT + NEW),
    )  # fmt: skip


def _k3_case(cfg: ModelConfig, name: str) -> Case:
    def make() -> tuple[Callable[[], Any], None]:
        ids = random_ids(cfg, BATCH, LENGTH + 1)
        return ours_step(init_weights(Transformer(cfg)), OptimConfig(), torch.float32, ids), None

    return Case(
        name=name, shape=f"nano, B{BATCH} T{LENGTH}, per-head Muon, quantile balancing", make=make,
        flops=BATCH * LENGTH * train_flops_per_token(cfg, LENGTH),
    )  # fmt: skip


def cases(peer: str) -> Iterator[Case]:
    """All rows.

    Args:
        peer: "transformers" or "none".

    Raises:
        ConfigError: unknown peer.
    """
    if peer not in PEERS:
        raise ConfigError(f"unknown peer {peer!r}; allowed: {', '.join(PEERS)}")
    with_peer = peer == "transformers"
    # Generation first: training moves the weights apart.
    yield _generate_case(1, with_peer)
    yield _generate_case(8, with_peer)
    yield _train_case(torch.float32, "fp32", with_peer)
    yield _train_case(torch.bfloat16, "bf16", with_peer)
    yield _k3_case(nano(), "train_step_k3_muon")


def run(
    device: str = "cpu",
    budget_seconds: float | None = None,
    peer: str = "transformers",
    *,
    results: Path | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measure the rows; see `bench.kernels.run`.

    Raises:
        ConfigError: unknown device or peer, or the peer is not installed.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r}; allowed: cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' asked for, but torch sees no CUDA device; use 'cpu'")
    keep_large_blocks()
    if peer == "transformers":
        import_peer()  # before the rows of earlier calls are read: its version is part of a row's identity
    if device == "cuda":
        from perilune.bench import gpu_train

        chosen = gpu_train.cases(peer)
    else:
        chosen = cases(peer)
    return run_suite(
        chosen, device=device, budget_seconds=budget_seconds, results=results, samples=SAMPLES, on_row=on_row
    )
