"""What the report says: headline numbers, sections and their words, from one run or from several."""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from perilune.explain.chart import Chart
from perilune.report import figures
from perilune.report.collect import Run, dig
from perilune.report.html import Block, Card, Meter, Page, Sample, Section, Table
from perilune.report.vision import picture_cards, pictures


def run_page(run: Run) -> Page:
    """The page of one run."""
    return Page(
        title=run.name, lead=_lead(run), chips=_chips(run), cards=_cards(run), sections=_sections(run), notes=run.notes
    )


def comparison_page(runs: Sequence[Run], *, details: bool) -> Page:
    """The page of several runs side by side; with `details`, each run's own sections follow."""
    sections = [_comparison(runs)]
    if details:
        for position, run in enumerate(runs):
            for section in _sections(run):
                sections.append(_renamed(section, f"{section.anchor}-{position}", f"{run.name}: {section.title}"))
    names = ", ".join(run.name for run in runs)
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    return Page(title=f"{len(runs)} runs side by side", lead=names, sections=sections, notes=notes)


def _renamed(section: Section, anchor: str, title: str) -> Section:
    return Section(anchor=anchor, title=title, text=section.text,
        points=section.points, pictures=section.pictures, charts=section.charts, tables=section.tables,
                   samples=section.samples, blocks=section.blocks, notes=section.notes)  # fmt: skip


# -- headline -------------------------------------------------------------------------------------------------------


def _lead(run: Run) -> str:
    train = _table(run.summary, "train")
    steps = train.get("steps") or (run.train[-1]["step"] if run.train else 0)
    tokens = train.get("tokens") or (run.train[-1].get("tokens") if run.train else 0) or 0
    seconds = train.get("seconds") or (run.train[-1].get("seconds") if run.train else 0) or 0
    parts = [f"{amount(steps)} steps", f"{amount(tokens)} tokens"]
    if images := train.get("images"):
        parts.append(f"{amount(images)} pictures")
    if seconds:
        parts.append(f"{duration(seconds)} of training")
    text = "A K3-class language model after " + ", ".join(parts) + "."
    if train.get("token_budget_reached") is True:
        text += " The token budget was reached."
    elif train.get("token_budget_reached") is False:
        text += " The time limit ended it before the token budget."
    elif not run.summary:
        text += " The run has not finished."
    return text


def _chips(run: Run) -> list[str]:
    model = _table(run.config, "model")
    if not model:
        return []
    chips = [f"{model.get('num_layers', '?')} layers", f"width {model.get('hidden_size', '?')}"]
    experts, active = dig(model, "moe.num_experts"), dig(model, "moe.experts_per_token")
    if isinstance(experts, int):
        chips.append(f"{experts} experts" + (f", {active} a token" if active else ""))
    for key, label in (
        ("mixer", "mixer"),
        ("residual", "residual"),
        ("activation", "activation"),
    ):
        if (value := dig(model, key)) is not None:
            chips.append(f"{label} {value}")
    if "balancer" in _table(model, "moe"):
        chips.append(f"balancer {_word(model['moe']['balancer'])}")
    if (name := run.setting("optim.name")) is not None:
        chips.append(f"optimizer {name}")
    precision = run.environment.get("precision") or run.setting("precision")
    return [*chips, str(precision)] if precision else chips


def _cards(run: Run) -> list[Card]:
    cards = []
    bits, lines = figures.final_bits(run), figures.baselines(run)
    if math.isfinite(bits):
        widest = max([bits, *(value for value, _ in lines)])
        meters = [Meter(name="model", share=bits / widest, text=f"{bits:.3f}", own=True)]
        meters += [Meter(name=label, share=value / widest, text=f"{value:.3f}") for value, label in lines]
        detail = "Total nats over all held-out bytes, in bits; lower is better."
        trigram = dig(run.summary, "baselines.trigram")
        if isinstance(trigram, (int, float)) and trigram > 0:
            detail = f"{bits / trigram:.3f} × the token trigram. " + detail
        cards.append(
            Card(
                label="held-out text",
                value=f"{bits:.3f}",
                unit="bits per byte",
                meters=meters if lines else (),
                detail=detail,
            )
        )
    speed = dig(run.summary, "train.tokens_per_second")
    if not isinstance(speed, (int, float)) and run.train:
        known = [
            record["tokens_per_second"]
            for record in run.train
            if isinstance(record.get("tokens_per_second"), (int, float))
        ]
        speed = fmean(known) if known else None
    if isinstance(speed, (int, float)):
        mfu = [record["mfu"] for record in run.train if isinstance(record.get("mfu"), (int, float))]
        detail = (
            f"{100 * fmean(mfu):.0f} % of the measured matmul peak."
            if mfu
            else "Averaged over the whole training time."
        )
        writing = dig(run.summary, "generate.tokens_per_second")
        if isinstance(writing, (int, float)):
            detail += f" Writes {amount(writing)} tokens a second."
        cards.append(Card(label="training speed", value=amount(speed), unit="tokens/s", detail=detail))
    ratio, pooled = dig(run.summary, "routing.max_over_mean"), dig(run.summary, "routing.pooled_worst_layer")
    if isinstance(ratio, (int, float)):
        detail = "The busiest expert, averaged over layers and the last fifth of the steps."
        if isinstance(pooled, (int, float)):
            detail += f" Pooled over those steps, the worst layer has {pooled:.3f}."
        free = dig(run.summary, "routing_without_balancing.max_over_mean")
        if isinstance(free, (int, float)):
            detail += f" Without balancing: {free:.2f}."
        cards.append(Card(label="routing", value=f"{ratio:.2f}", unit="× mean load", detail=detail))
    cached = dig(run.summary, "serve.cached_tokens_second_turn")
    if isinstance(cached, (int, float)):
        cards.append(Card(label="second chat turn", value=f"{cached:.0f}", unit="tokens cached",
                          detail="Tokens of the conversation that the server did not run again."))  # fmt: skip
    return cards + picture_cards(run)


# -- sections -------------------------------------------------------------------------------------------------------


def _sections(run: Run) -> list[Section]:
    sections = [
        _section("learning", "What it learnt", "Loss over training, and the same model measured on text that it never saw.",
                 [figures.loss(run), figures.bits_per_byte(run)], "no step was recorded yet"),
        pictures(run),
        _section("routing", "Experts", "Every token visits a few of the routed experts. " + _balancing(run),
                 [figures.routing_balance(run), figures.routing_load(run), figures.router_bias(run)],
                 "the run has no experts, or recorded no routing"),
        _section("depth", "Attention residuals", "Instead of adding every layer's output to one stream, each site takes a learnt softmax mix "
                 "of what earlier blocks produced.", [figures.attnres(run)], "the run uses a plain residual, or wrote no probes"),
        _section("memory", "Memory", "KDA layers keep a fixed-size state that every channel forgets at its own rate; MLA layers look at all "
                 "earlier tokens.", [figures.half_lives(run), figures.max_logits(run)], "the run has neither part, or wrote no probes"),
        _section("speed", "Speed and optimisation", "", [figures.throughput(run), figures.optimizer(run)], "no step was recorded yet"),
        _samples(run),
        _data(run),
        _setup(run),
    ]  # fmt: skip
    return [section for section in sections if section is not None]


def _balancing(run: Run) -> str:
    """What keeps the experts' load even in this run."""
    if "balancer" not in _table(_table(run.config, "model"), "moe"):
        return ""
    rule = _word(run.config["model"]["moe"]["balancer"])
    if rule.startswith("quantile") or rule == "dual":
        return "A selection bias, set from the quantiles of the router's own scores, keeps the load even without an extra loss."
    if rule == "sign":
        return "A selection bias moves a fixed step against the load's sign after every step."
    return "This run has no load balancing."


def _section(anchor: str, title: str, text: str, charts: Sequence[Chart | None], missing: str) -> Section:
    shown = [chart for chart in charts if chart is not None]
    return Section(
        anchor=anchor, title=title, text=text, charts=shown, notes=[] if shown else [f"Nothing to show: {missing}."]
    )


def _samples(run: Run, limit: int = 6) -> Section | None:
    chosen = _spread(run.samples, limit)
    bits = {record["step"]: record.get("bits_per_byte") for record in run.evals}
    shown = []
    for record in chosen:
        value = bits.get(record["step"])
        remark = f"{value:.3f} bits per byte" if isinstance(value, (int, float)) else ""
        shown.append(
            Sample(
                label=f"step {record['step']}",
                prompt=str(record.get("prompt", "")),
                text=str(record.get("text", "")),
                remark=remark,
            )
        )
    generated = run.summary.get("generate")
    if isinstance(generated, dict) and isinstance(generated.get("text"), str):
        shown.append(
            Sample(
                label="the finished model",
                prompt=str(generated.get("prompt", "")),
                text=generated["text"],
                remark="128 tokens at most",
            )
        )
    messages = dig(run.summary, "serve.messages", [])
    turns = [message for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    for turn, (asked, answered) in enumerate(zip(turns[::2], turns[1::2]), start=1):
        shown.append(Sample(label=f"chat over HTTP, turn {turn}", prompt=str(asked.get("content", "")) + "\n", text=str(answered.get("content", "")),
                            remark="a base model, not taught to chat"))  # fmt: skip
    if not shown:
        return None
    text = "The marked text was given, the rest was sampled from the model; nothing was picked by hand."
    return Section(anchor="samples", title="What it writes", samples=shown, text=text)


def _spread(samples: Sequence[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """At most `limit` samples of the last prompt spread over training, and those of other prompts at the last step."""
    if not samples:
        return []
    prompt, last = samples[-1].get("prompt"), samples[-1]["step"]
    over_time = [record for record in samples if record.get("prompt") == prompt]
    if len(over_time) > limit:
        over_time = [over_time[round(i * (len(over_time) - 1) / (limit - 1))] for i in range(limit)]
    return over_time + [record for record in samples if record["step"] == last and record.get("prompt") != prompt]


def _data(run: Run) -> Section | None:
    if not run.split and not run.setting("data"):
        return None
    rows, lists = [], []
    for key, value in _flat(run.split):
        if isinstance(value, list):
            names = [_item(item) for item in value]
            if len(names) > 8:
                lists.append(Block(title=f"{spoken(key)}: all {len(names)}", text="\n".join(names)))
                rows.append((spoken(key), f"{len(names)}: {', '.join(names[:6])} …"))
            else:
                rows.append((spoken(key), ", ".join(names) or "none"))
        else:
            rows.append((spoken(key), said(key, value)))
    return Section(anchor="data", title="Data and held-out text", tables=[Table(rows=rows)] if rows else [], blocks=lists,
                   text="What is held out was chosen by a hash of names, whole modules or documents at a time; near copies of training text are left out.",
                   notes=[] if rows else ["split.json is missing, so what was held out is not known."])  # fmt: skip


def _setup(run: Run) -> Section:
    environment = [
        (spoken(key), ", ".join(map(str, value)) if isinstance(value, list) else said(key, value))
        for key, value in _flat(run.environment)
    ]
    command = run.environment.get("command")
    if isinstance(command, list):
        command = " ".join(map(str, command))
    name, file = shlex.quote(f"{run.name}-again"), shlex.quote(f"{run.path}/config.toml")
    again = f"perilune train --config {file} --run {name}\nperilune report {name}"
    if command:
        again = f"# as it was started\n{command}\n\n# the same settings once more\n{again}"
    blocks = [Block(title="How to reproduce", text=again, folded=False)]
    if run.config_text:
        blocks.append(Block(title="Resolved configuration (config.toml)", text=run.config_text))
    return Section(anchor="setup", title="Reproduce", tables=[Table(rows=environment)] if environment else [], blocks=blocks,
                   text="Same settings, seed, versions and machine give the same weights, bit for bit.",
                   notes=[] if environment else ["environment.json is missing, so versions and hardware are not known."])  # fmt: skip


# -- several runs ---------------------------------------------------------------------------------------------------


def _comparison(runs: Sequence[Run]) -> Section:
    head = [
        "run",
        "bits per byte",
        "÷ trigram",
        "last loss",
        "tokens",
        "tokens/s",
        "routing max ÷ mean",
        "what differs",
    ]
    differing = _differences(runs)
    rows = [[run.name, *_row(run), differing[i]] for i, run in enumerate(runs)]
    tables = [Table(head=head, rows=rows)]
    groups: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        if math.isnan(figures.final_bits(run)):
            continue  # not scored yet: nothing to take a mean of
        groups[repr({key: value for key, value in _flat(run.config) if key != "seed"})].append(figures.final_bits(run))
    labels = {
        repr({key: value for key, value in _flat(run.config) if key != "seed"}): differing[i] or run.name
        for i, run in enumerate(runs)
    }
    if any(len(values) > 1 for values in groups.values()) and len(groups) > 1:
        tables.append(Table(
            head=["settings", "runs", "mean bits per byte", "spread between seeds (standard deviation)"],
            rows=[[_without_seed(labels[key]), str(len(values)), f"{fmean(values):.4f}", f"{stdev(values):.4f}" if len(values) > 1 else "one run"]
                  for key, values in sorted(groups.items(), key=lambda item: fmean(item[1]))],
        ))  # fmt: skip
    charts = [
        chart
        for chart in (figures.compare_loss(runs), figures.compare_bits(runs), figures.compare_final(runs))
        if chart is not None
    ]
    return Section(anchor="comparison", title="Side by side", tables=tables, charts=charts,
                   text="A difference smaller than the spread between seeds says nothing.")  # fmt: skip


def _row(run: Run) -> list[str]:
    bits, trigram = figures.final_bits(run), dig(run.summary, "baselines.trigram")
    loss = run.train[-1].get("loss") if run.train else None
    tokens = dig(run.summary, "train.tokens") or (run.train[-1].get("tokens") if run.train else None)
    speed, ratio = dig(run.summary, "train.tokens_per_second"), dig(run.summary, "routing.max_over_mean")
    return [
        f"{bits:.4f}" if math.isfinite(bits) else "–",
        f"{bits / trigram:.3f}" if math.isfinite(bits) and trigram else "–",
        f"{loss:.3f}" if isinstance(loss, (int, float)) and math.isfinite(loss) else "–",
        amount(tokens) if isinstance(tokens, (int, float)) else "–",
        amount(speed) if isinstance(speed, (int, float)) else "–",
        f"{ratio:.2f}" if isinstance(ratio, (int, float)) else "–",
    ]


def _differences(runs: Sequence[Run]) -> list[str]:
    """For each run, the settings that are not the same in all runs."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = [
        key
        for key in dict.fromkeys(key for each in flat for key in each)
        if len({repr(each.get(key)) for each in flat}) > 1
    ]
    return [", ".join(f"{key.removeprefix('model.')}={_word(each.get(key, 'unset'))}" for key in keys) for each in flat]


def _word(value: Any) -> str:
    """A setting as it is written in config.toml, where null is the word none."""
    return "none" if value is None else str(value)


def _without_seed(label: str) -> str:
    return ", ".join(part for part in label.split(", ") if not part.startswith("seed=")) or "same settings"


# -- words and numbers ----------------------------------------------------------------------------------------------


def _table(tree: dict[str, Any], key: str) -> dict[str, Any]:
    value = tree.get(key)
    return value if isinstance(value, dict) else {}


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, leaf) of nested dictionaries; lists are leaves."""
    if not isinstance(tree, dict):
        return []
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def _item(value: Any) -> str:
    return ", ".join(f"{key} {part}" for key, part in value.items()) if isinstance(value, dict) else str(value)


def spoken(key: str) -> str:
    """A key as a reader would say it."""
    return key.replace("held_out", "held-out").replace(".", " · ").replace("_", " ")


def said(key: str, value: Any) -> str:
    """A value with thousands separated; bytes also in a larger unit; null as "not known"."""
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        text = f"{value:,}"
        return f"{text} ({value / 1e6:.3g} MB)" if key.endswith("bytes") and value >= 10_000 else text
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def amount(value: float) -> str:
    """A count in at most four figures: 812, 9,340, 1.43 M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds as a person would say them."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
