"""The same calls from an event loop: many at once, streamed, cancelled."""

from __future__ import annotations

import asyncio

import pytest

from perilune.sandbox import AsyncSandboxes, Limits, Spec, State
from perilune.sandbox.protocol import GuestFileError, NoSuchSandbox

TESTED_DRIVERS = ("proc",)

SPEC = Spec(limits=Limits(memory_bytes=96 << 20, disk_bytes=16 << 20))
DEADLINE = 60.0


def run(home, body):
    async def main():
        async with AsyncSandboxes(home, sync="none") as sandboxes:
            await asyncio.wait_for(body(sandboxes), DEADLINE)

    asyncio.run(main())


def test_many_sandboxes_and_commands_at_once(driver, home):
    async def body(sandboxes):
        boxes = await asyncio.gather(*(sandboxes.create(SPEC, driver=driver) for _ in range(4)))
        results = await asyncio.gather(*(box.exec(["sh", "-c", f"echo {n}"]) for n, box in enumerate(boxes * 3)))
        assert [int(result.stdout) for result in results] == list(range(12))
        await asyncio.gather(*(box.destroy() for box in boxes))
        assert {box.state for box in boxes} == {State.DEAD}

    run(home, body)


def test_life_of_a_sandbox(driver, home):
    async def body(sandboxes):
        box = await sandboxes.create(SPEC, driver=driver)
        await box.write_file("/workspace/a", b"1")
        snapshot = await box.checkpoint()
        fork, other = (await box.fork(1, name="fork"))[0], await sandboxes.resume(snapshot.id)
        assert fork.name == "fork-1" and fork.id != box.id and (await box.capabilities()).fork
        await fork.write_file("/workspace/a", b"2")
        assert [await one.read_file("/workspace/a") for one in (box, fork, other)] == [b"1", b"2", b"1"]
        await box.pause()
        await box.resume()
        assert [entry.name for entry in await box.list("/workspace")] == ["a"] and await box.ports() == []
        with pytest.raises(GuestFileError):
            await box.read_file("/none")
        await asyncio.to_thread(fork.blocking.release)
        opened = await sandboxes.open("fork-1")
        await opened.resume()
        assert await opened.read_file("/workspace/a") == b"2"
        await asyncio.to_thread(opened.blocking.release)
        assert await sandboxes.remove(["fork-1"]) >= 0
        with pytest.raises(NoSuchSandbox):
            await sandboxes.open("fork-1")

    run(home, body)


def test_output_streams_and_leaving_early_ends_the_command(driver, home):
    async def body(sandboxes):
        box = await sandboxes.create(SPEC, driver=driver)
        pieces = [output.data async for output in box.stream(["sh", "-c", "echo one; echo two"])]
        assert b"".join(pieces) == b"one\ntwo\n"
        stream = box.stream(["sh", "-c", "echo $$ > /tmp/pid; while :; do echo y; done"])
        async for output in stream:
            assert output.stream == "stdout"
            break
        await stream.aclose()
        assert (await box.exec(["sh", "-c", "kill -0 $(cat /tmp/pid)"])).code != 0
        seen = []
        result = await box.exec(["echo", "hi"], on_output=seen.append)
        assert result.stdout == b"hi\n" == seen[0].data

    run(home, body)


def test_a_cancelled_command_is_killed_and_the_sandbox_goes_on(driver, home):
    async def body(sandboxes):
        box = await sandboxes.create(SPEC, driver=driver)
        begun = asyncio.Event()
        task = asyncio.ensure_future(
            box.exec(["sh", "-c", "echo $$ > /tmp/pid; echo up; sleep 1000"], on_output=lambda output: begun.set())
        )
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gone = await box.exec(
            ["sh", "-c", "while kill -0 $(cat /tmp/pid) 2>/dev/null; do :; done; echo gone"], timeout=30
        )
        assert gone.stdout == b"gone\n"

    run(home, body)
