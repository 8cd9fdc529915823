"""The chat page in a real browser: streaming, folded reasoning, tool cards, pictures, effort, counters, stop."""

from __future__ import annotations

import re
import threading

import pytest
from browser import Browser
from fake_engine import FakeEngine

from perilune.serve.api import serve_in_thread
from perilune.serve.api.information import PAGE
from perilune.serve.request import CallDelta, Delta

PNG = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # fmt: skip
TOOLS = '[{"name": "weather", "parameters": {"type": "object"}}]'
ANSWER = [
    Delta(0, "", reasoning="The user asks about the weather. "),
    Delta(0, "", reasoning="I should look it up."),
    Delta(0, "Let me look.\n```python\nprint(1)\n```\n"),
    Delta(0, "", calls=(CallDelta(0, '{"city": "Ly', "call_1", "weather"),)),
    Delta(0, "", calls=(CallDelta(0, 'on", "days": 3}'),)),
]


class Engine(FakeEngine):
    """A model that thinks and takes pictures."""

    thinking = takes_images = True


def call_engine(**options) -> Engine:
    engine = Engine(ANSWER, **options)
    pieces = engine.pieces
    pieces[-1] = (CallDelta(0, 'on", "days": 3}'),)  # ends with finish_reason tool_calls
    return engine


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def test_the_page_needs_nothing_from_elsewhere():
    page = PAGE.read_text(encoding="utf-8")
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+", page)) - {"http://www.w3.org"}
    assert not {one for one in addresses if "." in one}, addresses
    assert "<script src" not in page and '<link rel="stylesheet' not in page


def test_an_answer_with_reasoning_code_and_a_call(browser, tmp_path):
    engine = call_engine()
    with serve_in_thread(engine) as server:
        browser.open(server.url + "/")
        browser.wait("card && card.thinking")
        assert not browser.run("document.getElementById('effort').hidden || document.getElementById('attach').hidden")
        browser.run(
            f"$('declared').value = {TOOLS!r}; $('effort').value = 'high'; $('input').value = 'Weather?'; send()"
        )
        browser.wait("!running && document.querySelector('.counts')")
        assert browser.run("document.querySelector('.thought').open") is False, "reasoning folds when the answer begins"
        assert "look it up" in browser.run("document.querySelector('.thought div').textContent")
        assert browser.run("document.querySelector('.answer pre').textContent").strip() == "print(1)"
        assert browser.run("document.querySelector('.call').innerText").split() == [
            "weather", "tool", "call", "city", "Lyon", "days", "3",
        ]  # fmt: skip
        counts = browser.run("document.querySelector('.counts').innerText")
        assert "3 cached" in counts and "4 prompt tokens run" in counts and "tokens/s" in counts
        assert engine.options.effort == "high" and engine.options.tools[0]["function"]["name"] == "weather"
        browser.picture(tmp_path / "desktop.png")
        # The person gives the tool's result; the conversation goes on with it.
        engine.pieces = ["Sunny."]
        browser.run(
            "document.querySelector('.call .result input').value = '25 degrees'; document.querySelector('.sendresults').click()"
        )
        browser.wait("!running && messages.length === 4")
        roles = [message["role"] for message in engine.asked[-1][1]]
        assert roles == ["user", "assistant", "tool"]
        assert engine.asked[-1][1][2] == {"role": "tool", "content": "25 degrees", "tool_call_id": "call_1"}
        assert engine.asked[-1][1][1]["reasoning"].startswith("The user asks")
        browser.resize(390, 844, mobile=True)
        assert browser.run("document.documentElement.scrollWidth") <= 390, "the page is wider than a phone"
        browser.picture(tmp_path / "phone.png")
        browser.resize(1200, 900)


def test_the_page_follows_a_fast_answer_until_somebody_goes_up(browser):
    left = "$('scroll').scrollHeight - $('scroll').scrollTop - $('scroll').clientHeight"
    gate = threading.Semaphore(0)
    with serve_in_thread(FakeEngine(pieces=[f"line {n}\n" for n in range(120)], gate=gate)) as server:
        browser.open(server.url + "/")
        browser.wait("card")
        browser.run("$('input').value = 'Go'; send(); 0")
        for _ in range(60):
            gate.release()
        browser.wait("$('log').textContent.includes('line 59')")
        browser.wait(f"{left} < 5", seconds=5)
        browser.run("$('scroll').scrollTop -= 300; new Promise(done => setTimeout(done, 50))")
        for _ in range(60):
            gate.release()
        browser.wait("!running && document.querySelector('.counts')")
        assert browser.run(left) > 900, "somebody reads above; the page does not move"


def test_pictures_are_shown_and_sent(browser, tmp_path):
    engine = Engine(["A dot."])
    with serve_in_thread(engine) as server:
        browser.open(server.url + "/")
        browser.wait("card && card.images")
        drop = f"""fetch({PNG!r}).then(r => r.blob()).then(blob => {{
            const data = new DataTransfer();
            data.items.add(new File([blob], "dot.png", {{ type: "image/png" }}));
            document.dispatchEvent(new DragEvent("drop", {{ dataTransfer: data, bubbles: true, cancelable: true }}));
        }})"""
        browser.run(
            drop.replace(
                "fetch(", "(async u => new Response(Uint8Array.from(atob(u.split(',')[1]), c => c.charCodeAt(0))))("
            )
        )
        browser.wait("pictures.length === 1")
        browser.picture(tmp_path / "waiting.png")
        browser.run("$('input').value = 'What is it?'; send()")
        browser.wait("!running && document.querySelector('.counts')")
        image, text = engine.asked[0][1][0]["content"]
        assert image["type"] == "image" and image["image"].startswith(b"\x89PNG") and text["text"] == "What is it?"
        assert browser.run("document.querySelectorAll('.mine img').length") == 1


def test_stop_ends_the_answer_and_errors_are_told(browser):
    gate = threading.Semaphore(2)
    engine = Engine(["one ", "two ", "three"], gate=gate)
    with serve_in_thread(engine) as server:
        browser.open(server.url + "/")
        browser.run("$('input').value = 'Hi'; send(); undefined")
        browser.wait("document.querySelector('.text') && document.querySelector('.text').textContent === 'one two '")
        assert browser.run("$('send').textContent") == "Stop"
        browser.run("$('send').click()")
        browser.wait("!running")
        assert browser.run("document.querySelector('.counts').textContent") == "stopped"
        gate.release()
        engine.gate = None
        engine.pieces = ["a", ZeroDivisionError()]
        browser.run("$('input').value = 'again'; send()")
        assert "internal error" in browser.run("document.querySelector('.failure').textContent")
        browser.run("$('temperature').value = -1; $('input').value = 'again'; send()")
        assert "temperature" in browser.run("[...document.querySelectorAll('.failure')].at(-1).textContent")


def test_text_is_continued_and_markup_stays_text(browser):
    engine = FakeEngine(["<b>bold</b>", "<script>alert(1)</script>"])
    with serve_in_thread(engine) as server:
        browser.open(server.url + "/")
        browser.run("setMode('text'); $('input').value = 'def '; send()")
        browser.wait("!running && document.querySelector('.counts')")
        shown = browser.run("document.querySelector('.text').textContent")
        assert shown == "def <b>bold</b><script>alert(1)</script>"
        assert browser.run("document.querySelectorAll('.answer b:not(.counts b), .answer script').length") == 0
        assert engine.asked[0][1] == ["def "]
