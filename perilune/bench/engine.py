"""Speed of the serving engine beside what it must not be slower than: the bare model, a suffix alone, an idle machine.

Rows (random weights, greedy, no HTTP; `bench serve` measures whole requests):

- `engine_decode_b…`: one step of sequences of different lengths; peer: the bare model's step on a batch of equal length.
- `engine_generate_b8`: eight prompts and their answers; peer: transformers' `generate` with the same weights.
- `engine_together_b8`: first tokens of eight prompts that arrive together; peer: a pass for each of them.
- `engine_ttft_cold`: first token of a prefix that nobody has seen; peer: the bare model on it.
- `engine_ttft_hit`: first token of a prompt that begins with it; peer: the bare model on the rest, with the prefix's state
  at hand, which is what a cache can give at best. `…_host`, `…_disk`: the prefix comes back from a tier first.
- `engine_ttft_alone`: the same hit; peer: first token of the rest as a prompt of its own, whose attention sees no prefix.
- `engine_short_p99`: wait of short prompts among long ones; peer: on an idle engine. `…_in_burst`: one of them, and what it
  would wait without class budgets.
- `engine_aborts`: time of a load of which every tenth answer is stopped half-way, for as many whole answers; peer: nothing
  stopped. What was computed for the stopped ones counts as lost.
- `scheduler_step_…`: planning and settling a decoding step of 64 sequences, at two lengths; no model.

On a GPU the prefix has 400K tokens, and rows of the host alone are left out. `extra` has the ratio or the milliseconds that a row aims at, as `target_ratio` and `target_ms`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from perilune.bench import engine_loads as loads
from perilune.bench import engine_prefix, engine_waits
from perilune.bench.engine_driver import model_of
from perilune.bench.engine_waits import Waits
from perilune.bench.harness import Case, Measurable, Row, run_suite
from perilune.bench.kimi_linear import import_peer
from perilune.errors import ConfigError
from perilune.model import Transformer

BATCHES = (1, 8, 32)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Aimed:
    """A case with what is aimed at, noted in its row.

    Attributes:
        case: what is measured.
        target_ratio: least ratio; target_ms: most milliseconds.
    """

    case: Case
    target_ratio: float | None = None
    target_ms: float | None = None

    @property
    def name(self) -> str:
        """Of the case."""
        return self.case.name

    @property
    def shape(self) -> str:
        """Of the case."""
        return self.case.shape

    def measure(self, device: str, samples: int) -> Row:
        """See `Case.measure`."""
        row = self.case.measure(device, samples)
        aims = {"target_ratio": self.target_ratio, "target_ms": self.target_ms}
        return replace(row, extra=row.extra | {name: value for name, value in aims.items() if value is not None})


def cases(model_name: str, device: str) -> Iterator[Measurable]:
    """All rows."""
    model = model_of(model_name, device)
    on_cpu = device == "cpu"
    length = 512 if on_cpu else 4096
    prefix = engine_prefix.rows(model_name, device, engine_prefix.CPU if on_cpu else engine_prefix.GPU)
    if not on_cpu:  # first what only a GPU can run, lest a budget end before it
        yield from prefix
    for batch in BATCHES:
        yield Case(
            name=f"engine_decode_b{batch}", shape=f"{model_name}, lengths {length // 2} to {length}",
            make=lambda batch=batch: loads.decode(model, batch, length), peer="the bare model, equal lengths",
        )  # fmt: skip
    yield from _beside_transformers(device)
    yield Case(
        name="engine_together_b8", shape=f"{model_name}, prompts of 20 to 62 tokens", peer="a pass for each",
        make=lambda: (loads.together(model, one_pass=True), loads.together(model, one_pass=False)),
    )  # fmt: skip
    yield from prefix  # on a CPU
    answers = 60 if on_cpu else 20
    aborts = Case(
        name="engine_aborts", peer="nothing stopped",
        shape=f"{model_name}, {answers} whole answers of 16 to 32 tokens to 200, every tenth request stopped",
        make=lambda: tuple(loads.load(model, stops=stops, answers=answers) for stops in (True, False)),
    )  # fmt: skip
    yield Aimed(case=aborts, target_ratio=1 / 1.12)
    yield Waits(model=model, sizes=engine_waits.CPU if on_cpu else engine_waits.GPU, goal=0.5)
    if on_cpu:
        yield from _on_the_host(model, model_name)


def _on_the_host(model: Transformer, model_name: str) -> Iterator[Measurable]:
    """Rows that say the same on every device, or take too long where a pass is all launches."""
    yield Case(
        name="engine_short_in_burst", shape=f"{model_name}, 60 tokens behind 4 × 3000",
        make=lambda: (loads.burst_of(model, True), loads.burst_of(model, False)), peer="without class budgets",
    )  # fmt: skip
    for tokens in (1024, 65536):
        rows = loads.ROWS_OF_SCHEDULER
        case = Case(
            name=f"scheduler_step_{tokens}", shape=f"{rows} sequences of {tokens} tokens, K3's pages at TP8",
            make=lambda tokens=tokens: (loads.scheduler_step(tokens), None),
        )  # fmt: skip
        yield Aimed(case=case, target_ms=0.2)


def _beside_transformers(device: str) -> Iterator[Measurable]:
    """The row beside transformers, which runs in torch alone on a CPU; on a GPU `gpu_generate` has rows of its own."""
    if device != "cpu":
        return
    try:
        import_peer()
    except ConfigError as error:
        log.warning("engine_generate_b8 is left out: %s", error)
        return
    case = Case(
        name="engine_generate_b8", peer="transformers kimi_linear, generate with cache", make=loads.generate,
        shape=f"Kimi-Linear-shaped, 19 M parameters, batch 8, {loads.PROMPT} + {loads.NEW} tokens, fp32",
    )  # fmt: skip
    yield Aimed(case=case, target_ratio=3.0)


def run(
    device: str = "cpu",
    budget_seconds: float | None = None,
    model: str = "",
    *,
    results: Path | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Measure the rows; see `bench.kernels.run`.

    Args:
        model: a preset; "" = nano on a CPU, mini on a GPU.

    Raises:
        ConfigError: unknown device or preset.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r}; allowed: cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda' asked for, but torch sees no CUDA device; use 'cpu'")
    chosen = model or ("nano" if device == "cpu" else "mini")
    return run_suite(
        cases(chosen, device), device=device, budget_seconds=budget_seconds, results=results, on_row=on_row
    )
