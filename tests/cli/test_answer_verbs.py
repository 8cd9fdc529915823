"""`perilune generate`, `chat` and `serve` over a run with random weights, as a user types them."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import threading

import httpx
import pytest

from perilune import checkpoint
from perilune.cli import chat, generate, serve
from perilune.cli.main import main
from perilune.config import TrainConfig
from perilune.config.presets import tiny
from perilune.errors import CheckpointError, ConfigError, RequestError
from perilune.model import Transformer, init_weights
from perilune.rundir import RunDir
from perilune.serve.request import SamplingParams
from perilune.serve.run_engine import load_engine
from perilune.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    """A run folder with one checkpoint."""
    folder = RunDir(tmp_path_factory.mktemp("runs") / "little")
    folder.path.mkdir()
    tokenizer = ByteTokenizer()
    config = TrainConfig(model=dataclasses.replace(tiny(), vocab_size=tokenizer.vocab_size))
    folder.write_config(config)
    tokenizer.save(folder.tokenizer_path)
    model = Transformer(config.model)
    init_weights(model, 0)
    checkpoint.save(folder, 3, model=model.state_dict(), optimizer={}, state={})
    return str(folder.path)


def test_generate_prints_prompt_and_text(run, capsys):
    args = ["--run", run, "--prompt", "def f(", "--seed", "7", "--max-tokens", "9"]
    assert generate.run(args) == 0
    streamed = capsys.readouterr()
    assert streamed.out.startswith("def f(") and "seed 7" in streamed.err and "9 tokens" in streamed.err
    assert generate.run([*args, "--no-stream"]) == 0
    assert capsys.readouterr().out == streamed.out
    assert generate.run([*args, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt"] + answer["text"] + "\n" == streamed.out
    assert (answer["prompt_tokens"], answer["completion_tokens"], answer["finish_reason"]) == (6, 9, "length")
    assert answer["tokens_per_second"] > 0 and answer["seed"] == 7


def test_generate_tells_the_seed_it_chose(run, capsys):
    args = ["--model", run, "--prompt", "a", "--max-tokens", "12", "--temperature", "2", "--json"]
    generate.run(args)
    first = json.loads(capsys.readouterr().out)
    generate.run([*args, "--seed", str(first["seed"])])
    assert json.loads(capsys.readouterr().out)["text"] == first["text"]


def test_generate_reads_stdin_and_stops(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("x = 1\n"))
    args = ["--run", run, "--prompt", "-", "--temperature", "0", "--max-tokens", "8", "--json"]
    generate.run(args)
    text = json.loads(capsys.readouterr().out)["text"]
    monkeypatch.setattr("sys.stdin", io.StringIO("x = 1\n"))
    generate.run([*args, "--stop", text[2:]])
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt"] == "x = 1\n" and answer["text"] == text[: text.find(text[2:])]
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--temperature", "-1"], "--temperature"),
        (["--top-p", "0"], "--top-p"),
        (["--top-k", "x"], "--top-k"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--stop", ""], "stop"),
        (["--device", "tpu"], "--device"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_bad_flags_are_named(run, flags, words):
    with pytest.raises(ConfigError, match=words):
        generate.run(["--run", run, "--prompt", "a", *flags])


def test_missing_flags_and_runs(run, tmp_path, capsys):
    for verb, args in ((generate, ["--prompt", "a"]), (generate, ["--run", run]), (chat, ["--once", "a"]), (serve, [])):
        with pytest.raises(ConfigError, match="needed"):
            verb.run(args)
    with pytest.raises(CheckpointError, match="nowhere"):
        generate.run(["--run", str(tmp_path / "nowhere"), "--prompt", "a"])
    with pytest.raises(CheckpointError, match="3"):
        generate.run(["--run", run, "--prompt", "a", "--step", "4"])
    assert main(["generate", "--run", run]) == 2
    assert main(["generate", "--run", run, "--prompt", "x" * 9000]) == 1
    assert "8192" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [generate, chat, serve])
def test_help(verb, capsys):
    assert verb.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: perilune") and "--run NAME|PATH" in text
    flags = [line for line in text.splitlines() if line.startswith("  --")]
    assert len(flags) <= 15 and max(map(len, text.splitlines())) <= 120


def test_chat_once(run, capsys):
    args = ["--run", run, "--once", "Hi", "--seed", "1", "--max-tokens", "6"]
    assert chat.run(args) == 0
    shown = capsys.readouterr()
    assert "0 cached" in shown.err and "6 drawn" in shown.err
    assert chat.run([*args, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["text"] + "\n" == shown.out
    assert (answer["completion_tokens"], answer["cached_tokens"]) == (6, 0) and answer["prompt_tokens"] > 6
    with pytest.raises(ConfigError, match="--once"):
        chat.run(["--run", run, "--json"])
    with pytest.raises(ConfigError, match="--web"):
        chat.run(["--run", run, "--web", "--once", "a"])


def test_chat_in_the_terminal(run, capsys, monkeypatch):
    """Two turns, a reset, an unknown command, a question that does not fit, Ctrl-C at the prompt, end of input."""
    lines = iter(["Hi", "", "more", "/reset", "Hi", "/what", "x" * 9000, KeyboardInterrupt, EOFError])

    def ask(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", ask)
    assert chat.run(["--run", run, "--seed", "1", "--max-tokens", "4"]) == 0
    err = capsys.readouterr().err
    counts = [line.split(" cached")[0] for line in err.splitlines() if " cached" in line]
    assert len(counts) == 3 and counts[0] == "0" and int(counts[1]) > 0
    assert (
        "forgotten" in err and "unknown command /what" in err and "error: messages has" in err and "/quit leaves" in err
    )


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(run, monkeypatch, capsys):
    session = chat.ChatSession(load_engine(run), SamplingParams(seed=0, max_tokens=50))
    drawn = 0

    def interrupted(*args, **kwargs):
        nonlocal drawn
        drawn += 1
        if drawn == 3:
            raise KeyboardInterrupt

    lines = iter(["Hi", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr("builtins.print", interrupted)
    assert chat._talk(session) == 0
    assert [message["role"] for message in session.messages] == ["user", "assistant"]


def test_serve_refuses_to_be_open(run, monkeypatch):
    monkeypatch.delenv("PERILUNE_API_KEY", raising=False)
    for flags, words in (
        (["--host", "0.0.0.0"], "--no-auth"),
        (["--api-key", "k", "--no-auth"], "exclude"),
        (["--admin-key", "k"], "give --admin-port"),
        (["--drain-seconds", "nan"], "0 or more"),
        (["--port", "0", "--admin-port", "99999"], "--admin-port 99999 must be"),
        (["--api-key", ""], "empty"),
        (["--context", "1"], "--context"),
        (["--port", "70000"], "65535"),
    ):
        with pytest.raises(ConfigError, match=words):
            serve.run(["--run", run, *flags])


def test_serve_answers_two_turns_until_it_is_told_to_stop(run, capsys, monkeypatch):
    monkeypatch.setenv("PERILUNE_API_KEY", "secret")
    found: dict = {}

    def client() -> None:
        try:
            while "url" not in found:
                started.wait()
            headers = {"Authorization": "Bearer secret"}
            found["refused"] = httpx.get(found["url"] + "/v1/models").status_code
            messages = [{"role": "user", "content": "Hi"}]
            for turn in range(2):
                body = {"messages": messages, "max_tokens": 5, "seed": 1}
                url = found["url"] + "/v1/chat/completions"
                answer = httpx.post(url, json=body, headers=headers, timeout=60).json()
                found[turn] = answer
                messages += [answer["choices"][0]["message"], {"role": "user", "content": "And?"}]
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    started = threading.Event()
    real = json.dumps

    def announced(value, *args, **kwargs):
        if isinstance(value, dict) and "url" in value:
            found.update(value)
            started.set()
        return real(value, *args, **kwargs)

    monkeypatch.setattr(serve.json, "dumps", announced)
    thread = threading.Thread(target=client)
    thread.start()
    try:
        assert serve.run(["--run", run, "--port", "0", "--json"]) == 0
    finally:
        started.set()
        thread.join()
    assert found["model"] == "little" and found["refused"] == 401
    assert found[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    first = found[0]["usage"]
    cached = found[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    # A hit ends where a unit of the cache does: 64 tokens for a model of this size.
    assert first["total_tokens"] - 64 < cached < found[1]["usage"]["prompt_tokens"]
    assert json.loads(capsys.readouterr().out)["url"] == found["url"]


def test_a_run_says_whether_it_thinks(run):
    folder = RunDir(run)
    assert load_engine(run).thinking is False
    try:
        folder.write_json("chat.json", {"thinking": True})
        assert load_engine(run).thinking is True
        folder.write_json("chat.json", {"thinking": "yes"})
        with pytest.raises(CheckpointError, match="thinking"):
            load_engine(run)
    finally:
        (folder.path / "chat.json").unlink()
    with pytest.raises(RequestError):
        load_engine(run).complete([""], SamplingParams(seed=0, max_tokens=50))
