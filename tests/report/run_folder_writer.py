"""A run folder in the documented format, with plausible random content."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tomli_w

LAYERS, EXPERTS, HEADS, KEY = 4, 16, 2, 64


def write_run(path: Path, *, steps: int = 240, seed: int = 0, floor: float = 2.1, balancer: str = "quantile") -> Path:
    """Write a whole run folder at `path` and return it."""
    rng = np.random.default_rng(seed)
    (path / "probes").mkdir(parents=True)
    config = {
        "steps": steps, "tokens_per_step": 2048, "seed": seed,
        "model": {"vocab_size": 4096, "hidden_size": 128, "num_layers": LAYERS, "residual": "block", "attn_res_block_layers": 2,
                  "kda": {"num_heads": HEADS, "head_dim": KEY}, "moe": {"num_experts": EXPERTS, "balancer": balancer}},
        "stages": [{"seq_len": 256, "fraction": 0.75}, {"seq_len": 512, "fraction": 0.25}],
    }  # fmt: skip
    (path / "config.toml").write_text("# sha256 0123\n" + tomli_w.dumps(config))
    environment = {
        "python": "3.11.7",
        "packages": {"torch": "2.13.0+cpu"},
        "device": "a processor",
        "threads": 2,
        "precision": "float32",
    }
    (path / "environment.json").write_text(json.dumps(environment))
    split = {
        "train": {"documents": 512, "tokens": 3_100_000, "bytes": 10_400_000},
        "held_out": {"documents": 61, "tokens": 350_000, "bytes": 1_212_000},
        "source": "python standard library", "held_out_groups": ["asyncio", "email", "zipfile"],
        "held_out_names": [f"asyncio/part_{i}.py" for i in range(61)],
        "left_out": [{"name": "_pydecimal.py", "reason": "shares 61 % of its long lines", "bytes": 228_000}],
    }  # fmt: skip
    (path / "split.json").write_text(json.dumps(split))
    records, seconds = [], 0.0
    for step in range(1, steps + 1):
        long = step > steps * 0.75
        speed = (7400 if long else 9300) * rng.uniform(0.93, 1.03)
        seconds += 2048 / speed
        routing = [
            1 + (0.08 if balancer == "quantile" else 1.6) + 3 * np.exp(-step / 4) + rng.uniform(0, 0.06)
            for _ in range(LAYERS - 1)
        ]
        records.append({
            "kind": "train", "step": step, "tokens": 2048 * step, "loss": floor + 6 * np.exp(-step / 25) + rng.normal(0, 0.06),
            "seconds": seconds, "tokens_per_second": speed, "lr_muon": 0.02 * (1 - step / steps), "lr_adamw": 0.006 * (1 - step / steps),
            "grad_norm": rng.uniform(0.4, 1.2), "seq_len": 512 if long else 256, "routing_max_over_mean": routing, "mfu": 0.31,
        })  # fmt: skip
        if step % 40 == 0 or step == steps:
            bits = floor / 1.386 + 2.5 * np.exp(-step / 30)
            records.append(
                {
                    "kind": "eval",
                    "step": step,
                    "bits_per_byte": bits,
                    "nats": bits * 8.4e5,
                    "bytes": 1_212_000,
                    "tokens": 350_000,
                }
            )
        if step % 80 == 0:
            text = f"self):\n        return </script><b>{step}</b> & self._value\n"
            records.append({"kind": "sample", "step": step, "prompt": "def __init__(", "text": text})
            write_probe(path, step, rng, balancer)
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = {
        "train": {"steps": steps, "tokens": 2048 * steps, "token_budget_reached": True, "seconds": seconds,
                  "tokens_per_second": 2048 * steps / seconds, "loss_first": records[0]["loss"], "val_bits_per_byte": floor / 1.386},
        "baselines": {"gzip9": 2.31, "xz9e": 1.93, "trigram": 1.82},
        "routing": {"max_over_mean": 1.13, "pooled_worst_layer": 1.06},
        "routing_without_balancing": {"max_over_mean": 2.61, "pooled_worst_layer": 2.44, "steps": 60},
        "generate": {"tokens_per_second": 210.0, "prompt": "def main(", "text": "argv: list[str]) -> int:\n"},
        "serve": {"cached_tokens_second_turn": 87, "messages": [
            {"role": "user", "content": "Sort a list."}, {"role": "assistant", "content": "return sorted(values)"},
            {"role": "user", "content": "And reversed?"}, {"role": "assistant", "content": "<reversed>"}]}, "report": str(path / "report.html"),
    }  # fmt: skip
    (path / "summary.json").write_text(json.dumps(summary))
    return path


def write_probe(path: Path, step: int, rng: np.random.Generator, balancer: str) -> None:
    sharp = 0.25 if balancer == "quantile" and step > 80 else 1.1
    load = rng.dirichlet(np.full(EXPERTS, 6 / sharp**2), size=LAYERS - 1) * 8192
    sites = [*(f"{layer}.{part}" for layer in range(LAYERS) for part in ("mixer", "ffn")), "output"]
    weights = np.full((len(sites), 3), np.nan)
    for row in range(len(sites)):
        sources = 1 if row == 0 else 2 if row < 5 else 3  # blocks of two layers
        weights[row, :sources] = rng.dirichlet(np.full(sources, 2.0))
    np.savez(
        path / "probes" / f"step-{step:08d}.npz",
        routing_counts=load.astype(np.int64), routing_layers=np.array([1, 2, 3]),
        kda_half_life=10 ** rng.normal([[[0.4]], [[1.2]], [[2.0]]], 0.5, size=(3, HEADS, KEY)), kda_layers=np.array([0, 1, 2]),
        attnres_weights=weights, attnres_sites=np.array(sites), mla_max_logit=rng.uniform(4, 20, size=(1, 4)), mla_layers=np.array([3]),
        router_bias=rng.normal(0, 0.05, size=(3, EXPERTS)),
    )  # fmt: skip
