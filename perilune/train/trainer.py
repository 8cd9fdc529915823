"""The training loop. What happens beside the steps is in `callbacks/`.

    batch(step) → train_step → record → callbacks → checkpoint, until all steps are done or something says stop

The batch, the learning rate and the routers' biases are functions of the step and of what a checkpoint holds, so a run
that was stopped anywhere and resumed is bit for bit the run that was not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

from perilune import checkpoint
from perilune.config.train import TrainConfig
from perilune.data.loader import Batch
from perilune.errors import CheckpointError, ConfigError
from perilune.model.init import init_weights
from perilune.model.mla import GatedMLA
from perilune.model.transformer import Transformer
from perilune.optim.build import Optimizer, muon_dtype_for
from perilune.optim.schedule import multiplier
from perilune.quant import apply_qat
from perilune.rundir import RunDir, config_hash
from perilune.train.allocator import keep_large_blocks
from perilune.train.callbacks import (
    Callback,
    Evaluation,
    Interrupt,
    Metrics,
    Pictures,
    Probes,
    Sample,
    Saving,
    TimeLimit,
)
from perilune.train.environment import describe
from perilune.train.heldout import HeldOutResult
from perilune.train.mfu import measure_matmul_peak, mfu
from perilune.train.nonfinite import DivergedError
from perilune.train.precision import resolve_device, resolve_precision, set_threads
from perilune.train.recorded import Steps
from perilune.train.resume import check_same, generator_states, restore
from perilune.train.routing import RoutingHistory
from perilune.train.run_data import RunData, absolute, open_data
from perilune.train.step import Step, split_rows


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended.

    Attributes:
        finished: all steps are done, or the time is used up; False after an interrupt.
        stopped_by: "steps" | "time_limit" | "interrupt".
        train: steps, tokens, token_budget_reached, seconds, tokens_per_second, loss_first, loss_last,
            val_bits_per_byte.
        routing: max_over_mean, pooled_worst_layer (`train.routing`).
    """

    finished: bool
    stopped_by: str
    train: dict[str, Any]
    routing: dict[str, Any]


@lru_cache
def _peak(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    return measure_matmul_peak(device, dtype)


class Trainer:
    """A run in progress.

    Attributes:
        config, run, data, model, optimizer: the parts.
        steps: runs the optimizer steps; `steps.reason` says why none is recorded.
        step: optimizer steps done.
        tokens: token positions trained on.
        seconds: time spent in steps, by all processes of the run.
        stop_reason: set to end after the current step.
        saved_at_end: the last checkpoint of this process is written; what remains can be repeated.
        held_out: the last evaluation.
    """

    log = logging.getLogger("perilune.train")

    def __init__(self, config: TrainConfig, run: RunDir, data: RunData, *, callbacks: Sequence[Callback] = ()) -> None:
        self.config, self.run, self.data = config, run, data
        self.device = resolve_device(config.device)
        self.precision = resolve_precision(config.precision, self.device)
        self.threads = set_threads(config)
        keep_large_blocks()
        self.model = init_weights(Transformer(config.model), config.seed).to(self.device).train()
        self.model.compute_dtype = self.precision.dtype
        for module in self.model.modules():
            if isinstance(module, GatedMLA):
                module.fp32_output = config.fp32_attention_output
        apply_qat(self.model, config.quant)
        self.optimizer = Optimizer(
            self.model.named_parameters(),
            config.model,
            config.optim,
            muon_dtype=muon_dtype_for(self.device, self.precision.dtype),
        )
        parts = Step(self.model, self.optimizer, grad_clip=config.optim.grad_clip, qk_clip=config.optim.qk_clip)
        self.steps = Steps(parts, record=config.cuda_graphs == "auto")
        moe = self.model.moe_layers()
        self.routing = RoutingHistory(len(moe), config.model.moe.num_experts if moe else 0)
        self.callbacks: list[Callback] = [
            Metrics(),
            TimeLimit(),
            Evaluation(),
            Pictures(),
            Sample(),
            Probes(),
            Interrupt(),
            *callbacks,
        ]
        self.saving = Saving()
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.loss_first: float | None = None
        self.loss_last: float | None = None
        self.stop_reason: str | None = None
        self.saved_at_end = False
        self.held_out: HeldOutResult | None = None
        self._ahead: tuple[int, Batch] | None = None  # the next step's windows, and its number
        self._held = ExitStack()  # the run's lock, let go when fit ends
        self.peak = _peak(self.device, self.precision.dtype, self.threads)
        torch.manual_seed(config.seed)

    @classmethod
    def from_config(
        cls, config: TrainConfig | None, run: RunDir, *, resume: bool = False, callbacks: Sequence[Callback] = ()
    ) -> Trainer:
        """Set up a new run in a folder, or go on with the one that is there.

        Args:
            config: the run's; None with `resume` = the folder's own.
            run: the folder.
            resume: continue from the last whole checkpoint.
            callbacks: further ones, such as a progress line.

        Raises:
            ConfigError: the folder holds a run and `resume` is False, or the resumed configuration differs.
            CheckpointError: nothing to resume, or a checkpoint that does not fit.
            RequestError: no usable text.
        """
        if resume:
            old = run.read_config()
            config = old if config is None else absolute(config)
            check_same(old, config)
        else:
            if config is None:
                raise ConfigError("a new run needs a configuration")
            config = absolute(config)
            if run.exists():
                raise ConfigError(
                    f"the run {run.path} exists already; continue it with --resume, choose another --run, or delete the folder"
                )
        run.create()
        with ExitStack() as held:
            held.enter_context(run.lock())
            if not resume:
                run.write_config(config)
                # Pre-training teaches no think channel: the generation prompt of a chat opens the response at once.
                run.write_json("chat.json", {"thinking": False})
            try:
                trainer = cls(config, run, open_data(config, run), callbacks=callbacks)
            except BaseException:
                if not resume:
                    _withdraw(run)
                raise
            run.write_json(
                "environment.json",
                describe(trainer.device, trainer.precision, trainer.threads, trainer.peak, trainer.steps.reason),
            )
            if resume:
                restore(trainer)
            trainer._held = held.pop_all()
            return trainer

    # -- the loop ---------------------------------------------------------------------------------------------------

    def fit(self) -> Summary:
        """Train until the last step, the time limit or an interrupt, evaluate, and write summary.json.

        Raises:
            DivergedError: a loss or gradient was not finite; the last checkpoint stays as it was.
            CapacityError: the disk is full.
        """
        with self._held:
            try:
                self._each("on_start")
                self.saving.on_start(self)
                while self.step < self.config.steps and self.stop_reason is None:
                    record = self._advance()
                    self._each("on_step", record)
                    self.saving.on_step(self, record)
                self.saving.on_end(self)
                self.saved_at_end = True
                self._each("on_end")
                summary = self.summary()
                if summary.finished:
                    self.run.write_json("summary.json", asdict(summary))
                return summary
            finally:
                self._each("on_close")

    def _each(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *args)

    def record(self, record: dict[str, Any]) -> None:
        """Give a record to every callback (metrics, progress, …)."""
        self._each("on_record", record)

    def _advance(self) -> dict[str, Any]:
        """One step and its record."""
        config, index = self.config, self.step
        begin = time.perf_counter()
        batch = self._batch(index)
        optim = config.optim
        factor = multiplier(index, config.steps, warmup=optim.warmup, final=optim.final_lr)
        try:
            micro_batches = split_rows(batch, config.microbatch_tokens)
            result = self.steps.run(micro_batches, factor, meanwhile=lambda: self._look_ahead(index + 1))
        except DivergedError as error:
            raise DivergedError(self._advice(index + 1, error)) from None
        seconds = time.perf_counter() - begin
        self.step += 1
        self.tokens += batch.ids_BT.numel()
        self.seconds += seconds
        self.loss_first = result.loss if self.loss_first is None else self.loss_first
        self.loss_last = result.loss
        lr_muon, lr_adamw = self.optimizer.rates(factor)
        speed = batch.ids_BT.numel() / seconds
        seq_len = batch.ids_BT.shape[1]
        record = {
            "kind": "train",
            "step": self.step,
            "tokens": self.tokens,
            "loss": result.loss,
            "seconds": self.seconds,
            "tokens_per_second": speed,
            "lr_muon": lr_muon,
            "lr_adamw": lr_adamw,
            "grad_norm": result.grad_norm,
            "seq_len": seq_len,
            "routing_max_over_mean": self.routing.add(result.counts_LE),
            "clipped_heads": result.clipped_heads,
            "max_logit": result.max_logit,
            "mfu": mfu(config.model, seq_len, speed, self.peak),
        }
        if config.data.vision.share:
            record["images"] = sum(len(row) for row in batch.images)
        self.record(record)
        return record

    def _batch(self, index: int) -> Batch:
        """The windows of step `index`."""
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] == index else self.data.loader.batch(index)

    def _look_ahead(self, index: int) -> None:
        """Draw the next step's windows while a GPU is busy with this one's."""
        if self.device.type == "cuda" and index < self.config.steps:
            self._ahead = index, self.data.loader.batch(index)

    def _advice(self, step: int, error: DivergedError) -> str:
        last = self.run.latest_checkpoint()
        kept = f"the last good checkpoint is {last}" if last else "no checkpoint was due yet (checkpoint.every)"
        return (
            f"step {step}: {error}. Training stopped before the weights changed; {kept}. Start another --run with a lower "
            f"optim.lr_muon (now {self.config.optim.lr_muon:g}), optim.lr_adamw ({self.config.optim.lr_adamw:g}) or "
            f"optim.grad_clip ({self.config.optim.grad_clip:g})"
        )

    # -- state ------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of this step."""
        state = {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "loss_first": self.loss_first,
            "loss_last": self.loss_last,
            "config_sha256": config_hash(self.config),
            "loader": {"step": self.step, "fingerprint": self.data.loader.fingerprint},
            "tokenizer": {"fingerprint": self.data.tokenizer.fingerprint, "vocab_size": self.data.tokenizer.vocab_size},
            "balancer_bias": "layers.*.ffn.router.bias in the model files",
        }
        checkpoint.save(
            self.run,
            self.step,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_tensors() | self.routing.state_tensors() | generator_states(),
            state=state,
            keep=self.config.checkpoint.keep,
        )

    def summary(self) -> Summary:
        """The run so far."""
        done = self.step >= self.config.steps
        reason = "steps" if done and self.stop_reason != "interrupt" else self.stop_reason or "steps"
        train = {
            "steps": self.step,
            "tokens": self.tokens,
            "token_budget_reached": done,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else None,
            "loss_first": self.loss_first,
            "loss_last": self.loss_last,
            "val_bits_per_byte": self.held_out.bits_per_byte if self.held_out else None,
        }
        return Summary(reason != "interrupt", reason, train, self.routing.summary())


def finished(run: RunDir, config: TrainConfig) -> bool:
    """True if the run's summary says that its steps are done, or its time used up, under `config`.

    Raises:
        CheckpointError: there is a summary, but not one of a run.
    """
    if not (run.path / "summary.json").exists():
        return False
    summary = run.read_json("summary.json")
    try:
        train = summary["train"]
        out_of_time = 0 < config.time_limit <= train["seconds"]
        return bool(summary["finished"]) and (train["steps"] >= config.steps or out_of_time)
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"{run.path / 'summary.json'} is not the summary of a run; remove it and the run goes on from its checkpoint"
        ) from error


def _withdraw(run: RunDir) -> None:
    """Undo a run that could not begin, so that the same command works once its cause is mended."""
    for name in ("config.toml", "chat.json", "tokenizer.json", "split.json", ".lock"):
        (run.path / name).unlink(missing_ok=True)
    for folder in (run.path / "probes", run.checkpoints_path, run.path):
        try:
            folder.rmdir()
        except OSError:
            return
