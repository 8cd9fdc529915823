"""What goes before a recording, and what one that breaks off leaves behind. torch's CUDA is played here; `tests/gpu/test_train_step_gpu.py` has the real one."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from perilune.ops.cuda.graph import record_graph, warm_up


@pytest.fixture
def device(monkeypatch):
    """A device on which a recording changes the stream and the generator, and changes them back only if it ends well."""
    seen = SimpleNamespace(stream="main", state="drawing", fails=False)

    @contextlib.contextmanager
    def graph(_, *, pool, capture_error_mode):
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        seen.stream, seen.state = "side", "recording"
        yield
        if seen.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        seen.stream, seen.state = "main", "drawing"

    generator = SimpleNamespace(
        clone_state=lambda: seen.state, graphsafe_set_state=lambda state: setattr(seen, "state", state)
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, generator))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: seen.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(seen, "stream", stream))
    return seen


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_recording_gives_its_graph_and_what_it_writes(device, name):
    assert record_graph(lambda: device.stream, "pool", torch.device(name)) == ("graph", "side")
    assert (device.stream, device.state) == ("main", "drawing")


def test_a_recording_that_breaks_off_leaves_stream_and_generator_as_they_were(device):
    device.fails = True
    with pytest.raises(RuntimeError, match="capturing"):
        record_graph(lambda: None, "pool", torch.device("cuda"))
    assert (device.stream, device.state) == ("main", "drawing")


def test_what_goes_before_a_recording_runs_beside_the_current_stream_and_in_order_with_it(monkeypatch):
    events = []

    def stream(name):
        return SimpleNamespace(name=name, wait_stream=lambda other: events.append(f"{name} waits for {other.name}"))

    @contextlib.contextmanager
    def entered(side):
        events.append(f"on {side.name}")
        yield
        events.append("back")

    main = stream("main")
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream("side"))
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: main)
    warm_up(lambda: events.append("run"), torch.device("cuda"))
    assert events == ["side waits for main", "on side", "run", "back", "main waits for side"]
