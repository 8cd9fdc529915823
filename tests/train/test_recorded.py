"""Which steps are recorded, in which pieces, and what is replayed. That the recordings are right is for tests/gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from perilune.config import OptimConfig
from perilune.config.presets import tiny
from perilune.data.loader import Batch
from perilune.model.init import init_weights
from perilune.model.transformer import Transformer
from perilune.optim.build import Optimizer
from perilune.train import recorded
from perilune.train.inputs import Form, Inputs, obstacle
from perilune.train.recorded import MOST, WARM_UP, Steps, why_not
from perilune.train.step import Step, batch_loss


def made(**changes) -> Step:
    cfg = replace(tiny(), mixer="mla", **changes)
    model = init_weights(Transformer(cfg), 0).train()
    return Step(model, Optimizer(model.named_parameters(), cfg, OptimConfig()))


def batch(rows: int = 4, length: int = 256, documents: int = 0, seed: int = 0) -> Batch:
    """Rows of random tokens; so many documents begin inside a row."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 512, (rows, length + 1), generator=draw)
    starts = torch.zeros(rows, length, dtype=torch.bool)
    starts[:, 0] = True
    starts.view(-1)[torch.arange(1, documents + 1) * 5] = True
    return Batch(ids[:, :-1].clone(), ids[:, 1:].clone(), starts)


def form(*batches: Batch) -> Form | None:
    """The form of the first."""
    forms = Form.of(batches)
    return None if forms is None else forms[0]


def test_forms() -> None:
    assert form(batch()) == Form(4, 256, 0)
    assert form(batch(documents=1)) == form(batch(documents=4, seed=1)) == Form(4, 256, 8)
    assert form(batch(documents=5)) is None, "1024 tokens have room for eight documents"
    assert form(batch(rows=32, documents=32)) == Form(32, 256, 64)
    assert form(batch(rows=2, length=8192, documents=20)) == Form(2, 8192, 128)
    assert form(replace(batch(), images=((), ("an image",), (), ()))) is None


def test_micro_batches_of_a_step_have_room_alike() -> None:
    whole, few, many = (batch(rows=2, length=8192, documents=n) for n in (0, 3, 20))
    small = batch(rows=1, length=8192)
    assert Form.of([whole, few]) == [Form(2, 8192, 16)] * 2
    assert Form.of([whole, many, small]) == [Form(2, 8192, 128), Form(2, 8192, 128), Form(1, 8192, 64)]
    assert Form.of([whole, batch(documents=5)]) is None


@pytest.mark.parametrize("documents", [0, 3])
def test_inputs_give_the_loss_of_the_batch(documents: int) -> None:
    model = made().model
    one, two = (batch(documents=documents, seed=seed) for seed in (1, 2))
    inputs = Inputs(model, form(one))
    for each in (one, two, batch()) if documents else (one, two):  # rows without a cut fit too
        inputs.fill(each)
        got, want = inputs.loss(model), batch_loss(model, each)
        assert got.tokens == want.tokens
        torch.testing.assert_close(got.nats, want.nats, rtol=1e-6, atol=0)


class Pieces:
    """Stands in for recordings: keeps what was asked for, and runs it when it is replayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[object, list[str]]] = []
        monkeypatch.setattr(recorded, "obstacle", lambda model: None)
        monkeypatch.setattr(Steps, "_record", lambda steps, key: self.record(steps, key))

    def record(self, steps: Steps, key) -> recorded._Recording:
        log: list[str] = []
        self.made.append((key, log))
        step, (first, others) = steps.step, key
        measured = torch.zeros(4 + sum(layer.moe.num_experts for layer in step.moe), dtype=torch.float64)

        class Graph:
            def __init__(self, word: str, run) -> None:
                self.word, self.run = word, run

            def replay(self) -> None:
                log.append(self.word)
                self.run()

        def accumulate(form: Form, begin: bool) -> None:
            if begin:
                step.begin()
            step.accumulate(steps._inputs[form].loss(step.model), steps._valid)

        return recorded._Recording(
            Graph("first", lambda: accumulate(first, True)),
            {form: Graph(f"more {form.rows}", lambda form=form: accumulate(form, False)) for form in others},
            Graph("measure", lambda: measured.copy_(step.measure())),
            measured,
            Graph("update", lambda: step.update(lambda *scale: step.optimizer.apply(*scale))),
            None,
        )


def test_steps_are_recorded_after_some_and_replayed_in_order(monkeypatch) -> None:
    pieces = Pieces(monkeypatch)
    plain, steps, called = Steps(made(), record=False), Steps(made()), []
    for number in range(5):
        micro = [batch(seed=number), batch(seed=number + 10), batch(rows=2, seed=number)]
        a, b = (s.run(micro, 0.5, meanwhile=lambda: called.append(1)) for s in (plain, steps))
        assert (a.loss, a.grad_norm, a.tokens) == (b.loss, b.grad_norm, b.tokens)
        assert torch.equal(a.counts_LE, b.counts_LE)
    assert len(called) == 10
    ((key, log),) = pieces.made
    assert key == (Form(4, 256, 0), frozenset({Form(4, 256, 0), Form(2, 256, 0)}))
    assert log == ["first", "more 4", "more 2", "measure", "update"] * (5 - WARM_UP)
    for (name, p), q in zip(plain.model.named_parameters(), steps.model.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_few_recordings_are_kept(monkeypatch) -> None:
    pieces, steps = Pieces(monkeypatch), Steps(made(num_layers=1, dense_layers=1))
    for rows in range(1, MOST + 2):
        for _ in range(WARM_UP + 1):
            steps.run([batch(rows=rows, length=16)], 0.1)
    assert len(pieces.made) == MOST + 1 and len(steps._recordings) == MOST
    steps.run([batch(rows=1, length=16)], 0.1)
    assert len(pieces.made) == MOST + 2, "the oldest was given up and is made again"


def test_a_recording_that_fails_is_said_once_and_the_run_goes_on(monkeypatch, caplog) -> None:
    def refuse(steps: Steps, key) -> None:
        steps.step.begin()
        steps.step.accumulate(steps._inputs[key[0]].loss(steps.model), steps._valid)
        raise RuntimeError("operation not permitted when stream is capturing\nmore words")

    Pieces(monkeypatch)
    monkeypatch.setattr(Steps, "_record", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    plain, steps = Steps(made(), record=False), Steps(made())
    for number in range(WARM_UP + 2):
        losses = [s.run([batch(seed=number)], 0.5).loss for s in (plain, steps)]
        assert losses[0] == losses[1]
    assert steps.reason == "recording a step failed: operation not permitted when stream is capturing"
    assert [r.message for r in caplog.records].count(f"training steps run kernel by kernel: {steps.reason}") == 1


def test_reasons() -> None:
    step = made(num_layers=1, dense_layers=1)
    assert "not on cpu" in why_not(step.model) and "not on cpu" in obstacle(step.model)
    assert Steps(step).reason == why_not(step.model)
    assert Steps(step, record=False).reason == "switched off"


def test_a_balancer_that_asks_the_host_is_a_reason(monkeypatch) -> None:
    monkeypatch.setattr(recorded, "obstacle", lambda model: None)
    cfg = tiny()
    model = init_weights(Transformer(replace(cfg, moe=replace(cfg.moe, balancer="dual"))))
    assert "the balancer dual asks the host" in why_not(model) and "quantile, sign, none" in why_not(model)
    assert why_not(init_weights(Transformer(cfg))) is None
