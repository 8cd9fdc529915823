"""Training steps as CUDA graphs: some thousand kernels of a step become a handful of launches.

A step is recorded in pieces, each of which runs without waiting for the host:

    first   counts to zero, forward and backward of the step's first micro-batch; its gradients are written, not added
    more    forward and backward of a further micro-batch, one piece for each form among them
    measure loss, gradient norm, loads: what the host reads, and may give the step up for
    update  clip, optimizer, QK-clip, balancers; learning rates lie on the device

The first steps of each combination of forms run as they are: they compile kernels, and are steps like any other. Kernels
and their order are the same either way, so whether a step was replayed changes no bit of it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.data.loader import Batch
from perilune.model.transformer import Transformer
from perilune.ops.cuda.graph import record_graph
from perilune.ops.moe import BALANCERS
from perilune.ops.moe.balance import NoBalance, SignBias
from perilune.ops.moe.quantile import QuantileHistogram
from perilune.train.inputs import Form, Inputs, obstacle
from perilune.train.step import Step, StepResult, batch_loss, valid_targets

MOST = 4  # combinations of forms that are kept: each has its gradients
WARM_UP = 2  # steps before a recording
ON_DEVICE = (QuantileHistogram, SignBias, NoBalance)  # balancers that ask the host nothing

Forms = tuple[Form, frozenset[Form]]  # of the first micro-batch, and of the others


def how(device: torch.device) -> str:
    """How the training steps of a model on `device` are launched, as far as the device decides it; see `why_not`."""
    if device.type != "cuda":
        return f"kernel by kernel: CUDA graphs are recorded on CUDA devices, not on {device.type}"
    return "recorded as CUDA graphs, unless an operation of the model asks the host; the run's log says so then"


def why_not(model: Transformer) -> str | None:
    """Why the training steps of a model cannot be recorded; None if nothing is known that would prevent it."""
    reason = obstacle(model)
    if reason is not None:
        return reason
    for layer in model.moe_layers():
        if not isinstance(layer.balancer, ON_DEVICE):
            allowed = ", ".join(name for name, rule in BALANCERS.items() if rule in ON_DEVICE)
            return f"the balancer {layer.balancer.name} asks the host; these do not: {allowed}"
    return None


@dataclass(frozen=True, slots=True)
class _Recording:
    first: torch.cuda.CUDAGraph
    more: dict[Form, torch.cuda.CUDAGraph]
    measure: torch.cuda.CUDAGraph
    measured: Tensor
    update: torch.cuda.CUDAGraph
    addresses: object  # that the update reads


class Steps:
    """Runs optimizer steps, by recordings where that is possible and asked for.

    Args:
        step: the parts of a step.
        record: False = every step runs as it is.

    Attributes:
        reason: why no step is recorded; None as long as they are.
    """

    log = logging.getLogger("perilune.train")

    def __init__(self, step: Step, *, record: bool = True) -> None:
        self.step, self.model = step, step.model
        self.reason = why_not(self.model) if record else "switched off"
        self._static = obstacle(self.model) is None
        self._inputs: dict[Form, Inputs] = {}
        self._seen: dict[Forms, int] = {}
        self._recordings: OrderedDict[Forms, _Recording] = OrderedDict()
        self._valid = torch.zeros((), device=self.model.device)
        self._pool: tuple[int, int] | None = None  # memory that all recordings share: one runs at a time

    def run(
        self, micro_batches: Sequence[Batch], factor: float, meanwhile: Callable[[], object] = lambda: None
    ) -> StepResult:
        """Do one optimizer step.

        Args:
            micro_batches: the step's tokens; one forward and backward each.
            factor: of the schedule, on the peak learning rates.
            meanwhile: called once the device has its work, before its results are waited for.

        Raises:
            DivergedError: the loss or a gradient is not finite. Weights, momenta and biases are as before the step.
        """
        step, valid = self.step, valid_targets(micro_batches)
        forms = Form.of(micro_batches) if self._static else None
        recording = self._recording(forms)
        if self._static:
            self._valid.fill_(valid)
        if recording is None:
            self._accumulate(micro_batches, forms, valid)
            measured = step.measure()
        else:
            measured = self._replay(recording, micro_batches, forms)
        meanwhile()
        result = step.read(measured, valid)
        if recording is not None and not result.finite:  # run as it is, the step's gradients have names
            self._accumulate(micro_batches, forms, valid)
            result = step.read(step.measure(), valid)
        step.check(result, micro_batches)
        if recording is None:
            step.update(lambda *scale: step.optimizer.step(factor, *scale))
        else:
            step.optimizer.set_rates(factor)
            recording.update.replay()
        return result

    def _accumulate(self, micro_batches: Sequence[Batch], forms: Sequence[Form] | None, valid: int) -> None:
        """Forward and backward of all micro-batches, as they are."""
        self.step.begin()
        if forms is None:
            for micro in micro_batches:
                self.step.accumulate(batch_loss(self.model, micro), self._valid if self._static else valid)
            return
        for micro, form in zip(micro_batches, forms, strict=True):
            self._filled(micro, form)
            self.step.accumulate(self._inputs[form].loss(self.model), self._valid)

    def _filled(self, micro: Batch, form: Form) -> None:
        if form not in self._inputs:
            self._inputs[form] = Inputs(self.model, form)
        self._inputs[form].fill(micro)

    def _replay(self, recording: _Recording, micro_batches: Sequence[Batch], forms: Sequence[Form] | None) -> Tensor:
        assert forms is not None, "a recorded step has forms"
        for number, (micro, form) in enumerate(zip(micro_batches, forms, strict=True)):
            self._filled(micro, form)
            (recording.more[form] if number else recording.first).replay()
        recording.measure.replay()
        return recording.measured

    def _recording(self, forms: Sequence[Form] | None) -> _Recording | None:
        """The recording for these forms, made now if its time has come; None: the step has to run as it is."""
        if self.reason is not None or forms is None:
            return None
        first, *others = forms
        key: Forms = first, frozenset(others)
        if key in self._recordings:
            self._recordings.move_to_end(key)
            return self._recordings[key]
        self._seen[key] = self._seen.get(key, 0) + 1
        if self._seen[key] <= WARM_UP:
            return None
        try:
            recording = self._recordings[key] = self._record(key)
        except (RuntimeError, NotImplementedError) as error:  # an operation that waits, or that no recording can hold
            self._give_up(error)
            return None
        self.log.info("recorded a training step of %s", ", ".join(_words(form) for form in sorted({first, *others})))
        if len(self._recordings) > MOST:
            self._recordings.popitem(last=False)
        return recording

    def _give_up(self, error: Exception) -> None:
        self.reason = f"recording a step failed: {str(error).strip().splitlines()[0]}"
        self.log.warning("training steps run kernel by kernel: %s", self.reason)
        torch.cuda.synchronize(self.model.device)  # no recording may go while it runs
        self._recordings.clear()
        self.step.forget()

    def _record(self, key: Forms) -> _Recording:
        """Record the pieces in the order in which they run; nothing is executed."""
        step, (first, others) = self.step, key
        torch.cuda.empty_cache()  # a recording has memory of its own

        def forward_and_backward(form: Form, *, begin: bool = False) -> torch.cuda.CUDAGraph:
            def run() -> None:
                if begin:
                    step.begin()
                step.accumulate(self._inputs[form].loss(self.model), self._valid)

            return self._graph(run)

        start = forward_and_backward(first, begin=True)
        more = {form: forward_and_backward(form) for form in sorted(others)}
        kept: list[Tensor] = []
        measure = self._graph(lambda: kept.append(step.measure()))
        addresses = step.optimizer.prepare()  # copied to the device before, since a recorded copy would be repeated
        update = self._graph(lambda: step.update(step.optimizer.apply))
        return _Recording(start, more, measure, kept[0], update, addresses)

    def _graph(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return record_graph(run, self._pool, self.model.device)[0]


def _words(form: Form) -> str:
    documents = f", at most {form.documents} documents" if form.documents else ""
    return f"{form.rows} x {form.length} tokens{documents}"
