"""States and their legal changes: the table, and a model that creates, writes, saves, forks, pauses and destroys at random."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from perilune.errors import ConfigError, SandboxError
from perilune.sandbox import Limits, Sandbox, Sandboxes, Spec, State
from perilune.sandbox.protocol import TRANSITIONS, TransitionError

TESTED_DRIVERS = ("proc",)

SMALL = Limits(memory_bytes=64 << 20, disk_bytes=8 << 20, processes=16)


def test_every_state_can_be_reached_and_every_one_but_dead_can_be_left():
    reached, frontier = {State.CREATING}, [State.CREATING]
    while frontier:
        new = TRANSITIONS[frontier.pop()] - reached
        reached |= new
        frontier += new
    assert reached == set(State)
    assert [state for state in State if not TRANSITIONS[state]] == [State.DEAD]
    assert all(State.KILLING in TRANSITIONS[state] for state in State if state not in (State.KILLING, State.DEAD))


def test_an_illegal_change_names_both_states(box):
    for now, wanted in itertools.product(State, State):
        box.state = now
        if wanted in TRANSITIONS[now]:
            box._go(wanted)
            assert box.state is wanted
        else:
            with pytest.raises(TransitionError, match=f"is {now.value} and cannot go to {wanted.value}"):
                box._go(wanted)
            assert box.state is now
    box.state = State.RUNNING


def test_calls_that_do_not_fit_a_paused_or_a_dead_sandbox(box):
    with pytest.raises(TransitionError, match="running and cannot go to resuming"):
        box.resume()
    box.pause()
    calls = {
        "exec": lambda: box.exec(["true"]), "read": lambda: box.read_file("/a"), "write": lambda: box.write_file("/a", b""),
        "list": lambda: box.list("/"), "listening": box.ports, "connect": lambda: box.connect(1), "snapshotting": box.checkpoint,
        "forking": box.fork, "pausing": box.pause, "terminal": lambda: box.terminal(["sh"]),
    }  # fmt: skip
    for wanted, call in calls.items():
        with pytest.raises(TransitionError, match=f"is paused and cannot go to {wanted}"):
            call()
    box.destroy()
    for call in (*calls.values(), box.resume):
        with pytest.raises(TransitionError, match="is dead and cannot go to"):
            call()


def test_limits_and_networks_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="changed files live in memory"):
        Spec(limits=Limits(memory_bytes=1 << 20, disk_bytes=1 << 20))
    assert Spec(limits=Limits(memory_bytes=1 << 20, disk_bytes=1 << 20), changes="disk").changes == "disk"
    with pytest.raises(ConfigError, match="memory, disk"):
        Spec(changes="tape")
    with pytest.raises(ConfigError, match="cpus=0"):
        Limits(cpus=0)
    with pytest.raises(ConfigError, match="none, host"):
        Spec(network="egress")


def test_a_name_is_one_sandboxs(sandboxes, driver):
    sandboxes.create(driver=driver, name="mine")
    with pytest.raises(SandboxError, match="'mine' already"):
        sandboxes.create(driver=driver, name="mine")
    with pytest.raises(ConfigError, match="letters"):
        sandboxes.create(driver=driver, name="../x")
    with pytest.raises(ConfigError, match="proc"):
        sandboxes.create(driver="nothing")


class Life(RuleBasedStateMachine):
    """Sandboxes against a dictionary of files each; a snapshot must give back exactly its dictionary."""

    boxes: Bundle[Sandbox] = Bundle("boxes")
    snapshots: Bundle[str] = Bundle("snapshots")
    driver = ""
    templates = Path()

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        (self.folder / "proc").mkdir()
        (self.folder / "proc/templates").symlink_to(self.templates)
        self.sandboxes = Sandboxes(self.folder, sync="none")
        self.files: dict[str, dict[str, bytes]] = {}
        self.saved: dict[str, dict[str, bytes]] = {}
        self.frozen: set[str] = set()

    def teardown(self) -> None:
        self.sandboxes.close()
        assert self.sandboxes.home.store.verify() == []
        shutil.rmtree(self.folder)

    def check(self, box: Sandbox) -> None:
        found = {entry.name: box.read_file(f"/workspace/{entry.name}") for entry in box.list("/workspace")}
        assert found == self.files[box.id]

    @precondition(lambda self: sum(box.state is State.RUNNING for box in self.sandboxes._live.values()) < 5)
    @rule(target=boxes)
    def create(self) -> Sandbox:
        box = self.sandboxes.create(Spec(limits=SMALL), driver=self.driver)
        self.files[box.id] = {}
        return box

    @rule(
        box=boxes,
        name=st.sampled_from("abc"),
        data=st.binary(max_size=200) | st.sampled_from([b"x" * 70_000, bytes(100_000)]),
    )
    def write(self, box: Sandbox, name: str, data: bytes) -> None:
        if box.state is not State.RUNNING:
            with pytest.raises(TransitionError):
                box.write_file(f"/workspace/{name}", data)
            return
        box.write_file(f"/workspace/{name}", data)
        self.files[box.id][name] = data
        self.check(box)

    @rule(box=boxes, name=st.sampled_from("abc"))
    def remove(self, box: Sandbox, name: str) -> None:
        if box.state is State.RUNNING:
            assert box.exec(["rm", "-f", f"/workspace/{name}"]).code == 0
            self.files[box.id].pop(name, None)

    @rule(target=snapshots, box=boxes)
    def checkpoint(self, box: Sandbox):
        if box.state is not State.RUNNING:
            with pytest.raises(TransitionError):
                box.checkpoint()
            return multiple()
        snapshot = box.checkpoint().id
        self.saved[snapshot] = dict(self.files[box.id])
        return snapshot

    @rule(box=boxes, keep=st.booleans())
    def pause(self, box: Sandbox, keep: bool) -> None:
        if box.state is not State.RUNNING:
            with pytest.raises(TransitionError):
                box.pause(keep_memory=keep)
            return
        snapshot = box.pause(keep_memory=keep)
        assert (snapshot is None) == keep
        self.frozen |= {box.id} if keep else set()

    @rule(box=boxes)
    def go_on(self, box: Sandbox) -> None:
        if box.state is not State.PAUSED:
            with pytest.raises(TransitionError):
                box.resume()
            return
        before = box.generation
        box.resume()
        assert (box.generation == before) == (box.id in self.frozen)
        self.frozen.discard(box.id)
        self.check(box)

    @precondition(lambda self: len(self.sandboxes._live) < 5)
    @rule(target=boxes, snapshot=snapshots)
    def resume(self, snapshot: str) -> Sandbox:
        box = self.sandboxes.resume(snapshot)
        self.files[box.id] = dict(self.saved[snapshot])
        self.check(box)
        return box

    @precondition(lambda self: len(self.sandboxes._live) < 4)
    @rule(target=boxes, box=boxes, count=st.integers(1, 2))
    def fork(self, box: Sandbox, count: int):
        if box.state is not State.RUNNING:
            with pytest.raises(TransitionError):
                box.fork(count)
            return multiple()
        forks = box.fork(count)
        for fork in forks:
            self.files[fork.id] = dict(self.files[box.id])
            self.check(fork)
        return multiple(*forks)

    @rule(box=consumes(boxes))
    def destroy(self, box: Sandbox) -> None:
        box.destroy()
        assert box.state is State.DEAD

    @rule()
    def collect(self) -> None:
        self.sandboxes.home.store.collect()

    @invariant()
    def records_are_those_that_live(self) -> None:
        assert {record.id for record in self.sandboxes.home.records()} == set(self.sandboxes._live)
        assert all(box.state in (State.RUNNING, State.PAUSED) for box in self.sandboxes._live.values())


@pytest.mark.soak
def test_any_order_of_calls(driver, templates, count):
    machine = type("LifeOfThisDriver", (Life,), {"driver": driver, "templates": templates})
    chosen = settings(max_examples=count(full=300, reduced=6), stateful_step_count=count(full=40, reduced=20))
    run_state_machine_as_test(machine, settings=chosen)
