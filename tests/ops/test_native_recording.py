"""A recording does again what was done, on whatever lies in the tensors now, and refuses what it could not repeat."""

from __future__ import annotations

import threading

import pytest
import torch

from perilune.config.presets import tiny
from perilune.model import Transformer, init_weights
from perilune.ops.linear import linear
from perilune.ops.native import build
from perilune.ops.native.recording import NotRecordable, record
from perilune.ops.norm import rms_norm

WEIGHT, SCALE = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)), torch.linspace(0.5, 2.0, 12)


@torch.inference_mode()
def both(function, first, second):
    """(of the recording on `second`, of the function itself), and how many steps were recorded."""
    function(first)
    with record() as recorder:
        out = function(first)
    recording = recorder.finish()
    assert torch.equal(out, function(first.clone()))
    first.copy_(second)
    out.fill_(float("nan"))
    recording.replay()
    return out, function(second.clone()), recording


def kernels(x):
    return rms_norm(linear(x, WEIGHT), SCALE, 1e-6)


def plain(x):
    """Views, results of several tensors, an operation without an `out` form, one in place."""
    left, right = x.split(4, -1)
    values, _ = (left * 2 + right).sort(-1)
    y = torch.cat([values, left.sigmoid(), x.double().to(torch.float32)], -1)
    y[:, :2] += 1
    return y.clone()


@pytest.mark.parametrize("function", [kernels, plain])
def test_it_repeats_on_new_numbers(function):
    a, b = (torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    ours, wanted, recording = both(function, a, b)
    assert torch.equal(ours, wanted) and len(recording) > 1 and recording.nbytes > 0


@pytest.mark.skipif(build.unavailable_reason("linear") is not None, reason="no C compiler")
def test_a_library_that_the_loader_no_longer_knows_is_recorded_as_well(monkeypatch):
    monkeypatch.setattr(build, "_loaded", {})
    a, b = torch.randn(3, 8), torch.randn(3, 8)
    ours, wanted, recording = both(kernels, a, b)
    assert torch.equal(ours, wanted) and len(recording) == 2


@pytest.mark.skipif(build.unavailable_reason("linear") is not None, reason="no C compiler")
def test_kernels_are_recorded_as_single_calls():
    a, b = torch.randn(3, 8), torch.randn(3, 8)
    assert len(both(kernels, a, b)[2]) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.sum().item(),
        lambda x: x + torch.tensor([float(x.numel())]),
        lambda x: x[x[:, 0] > 0],
        lambda x: x + torch.rand(3, 8),
        lambda x: x * x[0].tolist()[0],
    ],
)
def test_what_goes_through_the_host_is_refused(function):
    with torch.inference_mode(), record() as recorder:
        function(torch.ones(3, 8))
    with pytest.raises(NotRecordable, match=r"host|random"):
        recorder.finish()


@torch.inference_mode()
def test_other_threads_are_not_recorded():
    x = torch.randn(3, 8)
    kernels(x)
    with record() as recorder:
        other = threading.Thread(target=lambda: torch.inference_mode()(kernels)(torch.randn(5, 8)))
        other.start()
        other.join()
        kernels(x)
    alone = len(both(kernels, torch.randn(3, 8), x)[2])
    assert len(recorder.finish()) == alone


@torch.inference_mode()
def test_weights_may_change_in_place():
    """As an update of a served model's weights does."""
    model = init_weights(Transformer(tiny()), 0).eval()
    ids = torch.tensor([[5], [7]])
    state = model.new_state(2, capacity=8)

    def forward(_):
        return model(ids, state, logits="last").logits_BTZ

    forward(ids)
    before = state.clone()
    with record() as recorder:
        out = forward(ids)
    recording = recorder.finish()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    for layer, kept in zip(state.layers, before.layers):
        for name, tensor in vars(kept).items():
            getattr(layer, name).copy_(tensor)
    recording.replay()
    assert torch.equal(out, model(ids, before, logits="last").logits_BTZ)
