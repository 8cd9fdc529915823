"""`perilune demo`: the main job end to end. Train a small K3 on real text, compare it, talk to it over HTTP, report it."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perilune.cli.train import own_name
from perilune.config import CheckpointConfig, EvalConfig, TrainConfig
from perilune.config.parse import parse_flags
from perilune.config.presets import training
from perilune.errors import ConfigError
from perilune.rundir import RunDir

if TYPE_CHECKING:
    from perilune.serve.local_engine import LocalEngine
    from perilune.train.trainer import Trainer

PROMPT = "def read_lines(path):\n"
TURNS = ("import os\nimport sys\n\n\ndef main(", "class Stack:\n    def __init__(self")
UNBALANCED_SHARE = 0.12
VISION_EVAL_TOKENS = 65536
"""Held-out text that is scored at the end of the demo with pictures, whose subject is another."""
TIME_LIMIT = 240.0
VISION_TIME_LIMIT = 300.0
"""Seconds of training after which a demo goes on with what it has, on text and on text and pictures."""


@dataclass(frozen=True, kw_only=True)
class DemoFlags:
    """Everything happens on this machine, from text that it already has; nothing is downloaded.

    Attributes:
        vision: train on text and drawn pictures together, then ask about pictures that were never seen.
        run: name or path of the run folder (default: demo, or demo-vision); a finished one is set aside as NAME.previous.
        steps: optimizer steps; 0 = the preset's, sized for about three minutes on two CPU cores (four with pictures).
        time_limit: seconds after which training stops and saves, whatever the steps (default: 240, or 300 with pictures).
        data: files, directories or globs instead of the standard library's sources.
        seed: of weights, data order and samples.
        json: one JSON object on stdout.
    """

    vision: bool = False
    run: str = ""
    steps: int = 0
    time_limit: float | None = None
    data: tuple[str, ...] = ()
    seed: int = 0
    json: bool = False


def demo_config(flags: DemoFlags) -> TrainConfig:
    """The training run of the demo."""
    base = training("nano_vision" if flags.vision else "nano")
    limit = flags.time_limit
    if limit is None:
        limit = VISION_TIME_LIMIT if flags.vision else TIME_LIMIT
    if limit <= 0 or flags.steps < 0:
        raise ConfigError(f"--time-limit {limit} must be above 0 and --steps {flags.steps} not negative")
    steps = flags.steps or base.steps
    return replace(
        base, steps=steps, time_limit=limit, seed=flags.seed, data=replace(base.data, path=flags.data),
        checkpoint=CheckpointConfig(every=max(50, steps // 4)), eval=EvalConfig(every=max(25, steps // 6), tokens=16384, final_tokens=VISION_EVAL_TOKENS if flags.vision else 0),
        probe_every=max(25, steps // 8),
    )  # fmt: skip


def run_folder(flags: DemoFlags) -> RunDir:
    """Where the demo writes."""
    return RunDir.resolve(flags.run or ("demo-vision" if flags.vision else "demo"))


def say(text: str) -> None:
    """Tell what is being done, on stderr."""
    print(text, file=sys.stderr, flush=True)


def open_trainer(flags: DemoFlags, config: TrainConfig) -> Trainer:
    """A fresh trainer, or the one that an interrupted demo left.

    Raises:
        ConfigError: another process is at work in the folder.
    """
    from perilune.cli.progress import ProgressLine
    from perilune.train.trainer import Trainer

    run = run_folder(flags)
    if run.exists():
        if run.latest_checkpoint() and not (run.path / "summary.json").exists() and run.read_config() == config:
            say(f"going on with the interrupted demo in {run.path}")
            return Trainer.from_config(None, run, resume=True, callbacks=[ProgressLine()])
        previous = run.path.with_name(run.path.name + ".previous")
        with run.lock():  # another demo that is at work here keeps its folder
            if previous.exists():
                shutil.rmtree(previous)
            run.path.rename(previous)
    return Trainer.from_config(config, run_folder(flags), callbacks=[ProgressLine()])


def _without_balancing(config: TrainConfig, run: RunDir) -> dict[str, Any]:
    """Routing of a short run of the same model whose bias never moves: what balancing is worth."""
    from perilune.train.trainer import Trainer

    steps = max(20, round(UNBALANCED_SHARE * config.steps))
    short = replace(
        config, steps=steps, model=replace(config.model, moe=replace(config.model.moe, balancer="none")),
        checkpoint=CheckpointConfig(), eval=EvalConfig(final_tokens=4096), probe_every=0, time_limit=40.0,
    )  # fmt: skip
    beside = RunDir(run.path / "without_balancing")
    if beside.exists():
        shutil.rmtree(beside.path)
    summary = Trainer.from_config(short, beside).fit()
    return asdict(summary)["routing"] | {"steps": summary.train["steps"]}


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def _two_turns(url: str, name: str) -> dict[str, Any]:
    """One conversation of two turns over HTTP; returns what was said and what the second turn did not run again."""
    messages: list[dict[str, str]] = []
    usage: dict[str, Any] = {}
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        answer = _post(url, {"model": name, "messages": messages, "max_tokens": 32, "temperature": 0.7, "seed": 0})
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        usage = answer["usage"]
    return {
        "messages": messages,
        "prompt_tokens_second_turn": usage["prompt_tokens"],
        "cached_tokens_second_turn": usage["prompt_tokens_details"]["cached_tokens"],
    }


def _generate(engine: LocalEngine) -> dict[str, Any]:
    """A sample and the decode speed."""
    from perilune.serve.request import SamplingParams

    job = engine.complete([PROMPT], SamplingParams(max_tokens=128, temperature=0.7, seed=0))
    text = "".join(delta.text for delta in job)
    return {"prompt": PROMPT, "text": text, "tokens_per_second": job.timing.tokens_per_second}


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    flags = parse_flags(DemoFlags, args, DemoFlags(), prog="perilune demo", description=__doc__ or "")
    if flags.vision:
        from perilune.cli.demo_vision import run_vision

        return run_vision(flags)
    began = time.perf_counter()
    config = demo_config(flags)
    say("1/6 text and tokenizer: Python sources of this machine" if not flags.data else "1/6 text and tokenizer")
    trainer = open_trainer(flags, config)
    summary = trainer.fit()
    if not summary.finished:
        say("stopped and saved; the same command goes on")
        return 130
    result = asdict(summary)
    run_dir = trainer.run

    def stage(text: str, key: str, work: Callable[[], Any]) -> None:
        say(text)
        result[key] = work()
        run_dir.write_json("summary.json", result)

    from perilune.eval.baselines import baselines
    from perilune.serve.api.server import serve_in_thread
    from perilune.serve.run_engine import load_engine

    stage("2/6 the same held-out bytes under gzip, xz and a trigram", "baselines",
          lambda: asdict(baselines(trainer.data.prepared)))  # fmt: skip
    stage("3/6 a short run without balancing, to compare", "routing_without_balancing",
          lambda: _without_balancing(config, run_dir))  # fmt: skip
    engine = load_engine(run_dir.path, device=trainer.device.type)  # what was saved, as `generate` and `serve` load it
    stage("4/6 generate", "generate", lambda: _generate(engine))
    say("5/6 a chat of two turns over HTTP")
    with contextlib.closing(engine), serve_in_thread(engine) as handle:
        result["serve"] = {"url": handle.url, **_two_turns(handle.url, run_dir.name)}
    run_dir.write_json("summary.json", result)
    say("6/6 report")
    return finish(flags, run_dir, result, began, _print)


def finish(
    flags: DemoFlags,
    run_dir: RunDir,
    result: dict[str, Any],
    began: float,
    show: Callable[[dict[str, Any], Path], None],
) -> int:
    """Write the report and say what came out: as JSON, or as `show` does. Returns the exit code."""
    from perilune.report.build import build

    result["report"] = str(run_dir.path / "report.html")
    result["seconds"] = time.perf_counter() - began
    run_dir.write_json("summary.json", result)
    build([run_dir.path])
    if flags.json:
        print(json.dumps(result | {"run": str(run_dir.path)}))
    else:
        show(result, run_dir.path)
    return 0


def _print(result: dict[str, Any], path: Path) -> None:
    train, base, routing = result["train"], result["baselines"], result["routing"]
    without, generate, serve = result["routing_without_balancing"], result["generate"], result["serve"]
    bits = train["val_bits_per_byte"]
    ended = "all steps" if train["token_budget_reached"] else f"the time limit after {train['steps']} steps"
    print(
        f"trained      {train['tokens']:,} tokens in {train['seconds']:.0f} s, {train['tokens_per_second']:,.0f} tokens/s ({ended})"
    )
    print(f"held-out     {bits:.3f} bits/byte; gzip {base['gzip9']:.3f}, xz {base['xz9e']:.3f}, "
          f"trigram {base['trigram']:.3f} ({bits / base['trigram']:.2f} × the trigram)")  # fmt: skip
    print(f"routing      busiest expert {routing['max_over_mean']:.2f} × mean a step, {routing['pooled_worst_layer']:.2f} × pooled; "
          f"without balancing {without['max_over_mean']:.2f} × and {without['pooled_worst_layer']:.2f} ×")  # fmt: skip
    print(f"generate     {generate['tokens_per_second']:.0f} tokens/s: {generate['prompt'] + generate['text'][:60]!r}")
    print(f"serve        second turn: {serve['cached_tokens_second_turn']} of {serve['prompt_tokens_second_turn']} prompt tokens "
          "were not run again")  # fmt: skip
    print(f"report       {result['report']}")
    again = own_name(RunDir(path))
    print(f"next         perilune chat --run {again}   ·   perilune explain kda --run {again}")
