"""The report's pictures: what each shows of a run, as charts (`explain.chart`).

Every function takes what was recorded and returns a chart, or None where the run has nothing to show.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from perilune.explain.chart import Bars, Chart, Heatmap, LineChart, Ridges, Series
from perilune.explain.depth import running_sum_last, site_name, source_names
from perilune.report.collect import Run

MAX_POINTS = 1200
MAX_CELLS = 40_000
BASELINES = (("gzip9", "gzip −9"), ("xz9e", "xz −9e"), ("trigram", "token trigram"))


def smooth(values: np.ndarray, span: int) -> np.ndarray:
    """Average over `span` points around each one (fewer at the ends); NaN points are skipped."""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    place = np.arange(len(values))
    low, high = np.maximum(place - span // 2, 0), np.minimum(place + span // 2 + 1, len(values))
    found = counts[high] - counts[low]
    return np.where(found > 0, (sums[high] - sums[low]) / np.maximum(found, 1), np.nan)


def thin(*columns: np.ndarray, limit: int = MAX_POINTS) -> list[np.ndarray]:
    """Every n-th point and the last one, so that a long run's curve stays a light file."""
    length = len(columns[0])
    if length <= limit:
        return list(columns)
    keep = np.unique(np.append(np.arange(0, length, -(-length // limit)), length - 1))
    return [column[keep] for column in columns]


def stage_boundaries(run: Run) -> list[tuple[float, str]]:
    """(step, label) of each change of the window length, the first stage included if there are several."""
    steps, lengths = run.column("step"), run.column("seq_len")
    known = np.isfinite(lengths)
    steps, lengths = steps[known], lengths[known]
    if len(lengths) == 0 or (lengths == lengths[0]).all():
        return []
    starts = [0, *(np.flatnonzero(np.diff(lengths)) + 1)]
    return [(float(steps[i]), f"window {int(lengths[i])}") for i in starts]


def loss(run: Run) -> Chart | None:
    """Training loss, raw and smoothed, and the loss on held-out text."""
    if not run.train:
        return None
    raw, steps = run.column("loss"), run.column("step")
    span = max(5, min(50, len(raw) // 20))
    x, pale, curve = thin(steps, raw, smooth(raw, span))
    series = [
        Series(name="each step", x=x, y=pale, faint=True, color=0),
        Series(name=f"training, average over {span} steps", x=x, y=curve, color=0),
    ]
    with np.errstate(invalid="ignore", divide="ignore"):
        held = run.column("nats", run.evals) / run.column("tokens", run.evals)
    if np.isfinite(held).any():
        series.append(Series(name="held-out text", x=run.column("step", run.evals), y=held, color=1))
    vocabulary = run.setting("model.vocab_size")
    lines = (
        [(math.log(vocabulary), f"guessing: ln {vocabulary}")] if isinstance(vocabulary, int) and vocabulary > 1 else []
    )
    return LineChart(
        title="Loss", x_label="step", y_label="nats per token", series=series, horizontals=lines, verticals=stage_boundaries(run),
        caption="The gap between training and held-out text is what does not carry over to unseen modules.",
    )  # fmt: skip


def bits_per_byte(run: Run) -> Chart | None:
    """Held-out bits per byte against compressors and the trigram model."""
    bits = run.column("bits_per_byte", run.evals)
    if not np.isfinite(bits).any():
        return None
    lines = baselines(run)
    partial = bool(run.setting("eval.tokens")) and run.setting("eval.final_tokens") == 0 and len(bits) > 1
    return LineChart(
        title="Bits per byte on held-out text", x_label="step", y_label="bits per byte", horizontals=lines,
        series=[Series(name="model", x=run.column("step", run.evals), y=bits, color=0)],
        verticals=stage_boundaries(run),
        caption=(
            "Below the lowest dotted line, the model predicts unseen text better than every baseline."
            if lines
            else "Lower is better: the cost of unseen text, whatever the tokenizer."
        )
        + (" Points before the last are measured on a fixed part of the held-out text, the last on all of it." if partial else ""),
    )  # fmt: skip


def baselines(run: Run) -> list[tuple[float, str]]:
    """(bits per byte, label) of the baselines in the summary."""
    recorded = run.summary.get("baselines")
    recorded = recorded if isinstance(recorded, dict) else {}
    return [
        (float(recorded[key]), label)
        for key, label in BASELINES
        if isinstance(recorded.get(key), (int, float)) and math.isfinite(recorded[key]) and recorded[key] > 0
    ]


def throughput(run: Run) -> Chart | None:
    """Tokens a second over training."""
    speed = run.column("tokens_per_second")
    if not np.isfinite(speed).any():
        return None
    x, raw, curve = thin(run.column("step"), speed, smooth(speed, max(5, len(speed) // 25)))
    return LineChart(
        title="Throughput", x_label="step", y_label="tokens per second", verticals=stage_boundaries(run),
        series=[Series(name="each step", x=x, y=raw, faint=True, color=2), Series(name="average", x=x, y=curve, color=2)],
        y_range=(0.0, 1.15 * float(np.nanpercentile(speed, 99))),
        caption="Longer windows cost attention time; dips elsewhere are evaluations, saves, or another user of the machine.",
    )  # fmt: skip


def optimizer(run: Run) -> Chart | None:
    """Gradient norm and learning rates."""
    norm = run.column("grad_norm")
    series = []
    for key, name, color in (
        ("grad_norm", "gradient norm", 3),
        ("lr_muon", "learning rate, Muon", 0),
        ("lr_adamw", "learning rate, AdamW", 1),
    ):
        values = run.column(key)
        if np.isfinite(values).any() and np.nanmax(values) > 0:
            x, y = thin(run.column("step"), np.where(values > 0, values, np.nan))
            series.append(Series(name=name, x=x, y=y, color=color))
    if not series or not np.isfinite(norm).any():
        return None
    return LineChart(
        title="Gradient norm and learning rates", x_label="step", y_label="norm, rate", y_log=True, series=series,
        caption="A gradient norm that climbs while the rate falls would be an early sign of instability.",
    )  # fmt: skip


def routing_balance(run: Run) -> Chart | None:
    """Busiest expert over mean load, per layer and step."""
    rows = [record.get("routing_max_over_mean") for record in run.train]
    width = max((len(row) for row in rows if isinstance(row, list)), default=0)
    if not width:
        return None
    table = np.array([[_float(row, i) for i in range(width)] for row in rows], dtype=float)
    layers = _moe_layers(run, width)
    steps = run.column("step")
    if width <= 6:
        series = [
            Series(name=f"layer {layers[i]}", x=(cut := thin(steps, smooth(table[:, i], 5)))[0], y=cut[1], color=i)
            for i in range(width)
        ]
    else:
        series = []
        for name, reduce, color in (
            ("worst layer", np.nanmax, 1),
            ("median layer", np.nanmedian, 0),
            ("best layer", np.nanmin, 2),
        ):
            alive = np.isfinite(table).any(axis=1)
            x, y = thin(steps[alive], smooth(reduce(table[alive], axis=1), 5))
            series.append(Series(name=name, x=x, y=y, color=color))
    free = [
        (record["step"], row)
        for record in run.unbalanced
        if isinstance(row := record.get("routing_max_over_mean"), list) and row
    ]
    if free:
        mean = np.array([np.mean([_float(row, i) for i in range(len(row))]) for _, row in free])
        series.append(
            Series(
                name="without balancing, mean of layers",
                x=[step for step, _ in free],
                y=smooth(mean, 5),
                style="dash",
                color=7,
            )
        )
    return LineChart(
        title="Routing balance", x_label="step", y_label="busiest expert ÷ mean load", y_log=True, series=series, horizontals=[(1.0, "perfect balance")],
        caption="1 would be perfect balance; the fewer tokens a step has, the more of the rest is the noise of one batch.",
    )  # fmt: skip


def _float(row: object, i: int) -> float:
    value = row[i] if isinstance(row, list) and i < len(row) else None
    return float(value) if isinstance(value, (int, float)) else math.nan


def _moe_layers(run: Run, count: int) -> list[str]:
    for probe in reversed(run.probes):
        layers = probe.get("routing_layers")
        if layers is not None and len(layers) == count:
            return [str(layer) for layer in layers]
    return [str(i) for i in range(count)]


def routing_load(run: Run) -> Chart | None:
    """Load of every expert in every MoE layer, relative to the layer's mean, with a slider over probes."""
    frames = []
    for step, counts in _probed(run, "routing_counts"):
        with np.errstate(invalid="ignore", divide="ignore"):
            frames.append((f"step {step}", counts / counts.mean(axis=1, keepdims=True)))
    if not frames:
        return None
    rows, columns = frames[-1][1].shape
    return Heatmap(
        title="Routing load", frames=frames, rows=[f"layer {name}" for name in _moe_layers(run, rows)], columns=[str(i) for i in range(columns)],
        x_label="expert", y_label="layer", value_label="load ÷ mean", center=1.0, limits=(0.0, 2.0),
        caption="An even field near 1 means that every expert works; well above is an expert that is overloaded, near 0 one that starves.",
    )  # fmt: skip


def router_bias(run: Run) -> Chart | None:
    """Selection bias of every expert."""
    frames = [(f"step {step}", bias) for step, bias in _probed(run, "router_bias")]
    if not frames or all(not np.any(np.nan_to_num(bias)) for _, bias in frames):
        return None
    rows, columns = frames[-1][1].shape
    return Heatmap(
        title="Selection bias", frames=frames, rows=[f"layer {name}" for name in _moe_layers(run, rows)], columns=[str(i) for i in range(columns)],
        x_label="expert", y_label="layer", value_label="bias", center=0.0,
        caption="What the balancer adds to each expert's score to keep the load even: the mirror image of what the router alone would prefer.",
    )  # fmt: skip


def attnres(run: Run) -> Chart | None:
    """Weight that each site of the residual scheme gives to each source."""
    frames = [(f"step {step}", weights) for step, weights in _probed(run, "attnres_weights")]
    if not frames:
        return None
    summed = run.setting("model.residual") in ("block", "full")
    if summed:
        frames = [(label, running_sum_last(weights)) for label, weights in frames]
    rows, columns = frames[-1][1].shape
    sites = next((found for probe in reversed(run.probes) if (found := probe.get("attnres_sites")) is not None), None)
    names = [site_name(str(site)) for site in sites] if sites is not None else []
    return Heatmap(
        title="Attention residual weights",
        frames=frames,
        rows=names if len(names) == rows else [f"site {i}" for i in range(rows)],
        columns=source_names(
            columns, run.setting("model.attn_res_block_layers", 1) if summed else None, run.setting("model.residual")
        ),
        x_label="source",
        y_label="site",
        value_label="weight",
        limits=(0.0, 1.0),
        show_values=rows * columns <= 150,
        caption="Each row sums to 1 and says which earlier outputs a site reads; even rows are the start of training, sharp ones were learnt.",
    )


def half_lives(run: Run) -> Chart | None:
    """Distribution of the decay half-lives over the channels of each KDA layer."""
    found = list(_probed(run, "kda_half_life", keep=1))
    if not found:
        return None
    step, values = found[-1]
    layers = next(
        (probe.get("kda_layers") for probe in reversed(run.probes) if probe.get("kda_layers") is not None), None
    )
    names = (
        [f"layer {layer}" for layer in layers]
        if layers is not None and len(layers) == len(values)
        else [f"#{i}" for i in range(len(values))]
    )
    shown = np.unique(np.linspace(0, len(names) - 1, min(len(names), 24)).round().astype(int))
    longest = max(
        (stage.get("seq_len", 0) for stage in run.setting("stages", []) if isinstance(stage, dict)), default=0
    )
    return Ridges(
        title="How long KDA channels remember", groups=[(names[i], values[i]) for i in shown], x_label="half-life, tokens",
        marks=[(float(longest), f"longest window {longest}")] if longest else [],
        caption=f"One value per channel at step {step}: left forgets within a few tokens, right keeps across the window; the tick is the median.",
    )  # fmt: skip


def max_logits(run: Run) -> Chart | None:
    """Largest attention logit of each MLA layer or head over training."""
    found = list(_probed(run, "mla_max_logit"))
    if not found:
        return None
    steps = np.array([step for step, _ in found], dtype=float)
    table = np.stack([values for _, values in found])  # [probes, layers, heads]
    layers = next(
        (probe.get("mla_layers") for probe in reversed(run.probes) if probe.get("mla_layers") is not None), None
    )
    names = (
        [str(layer) for layer in layers]
        if layers is not None and len(layers) == table.shape[1]
        else [str(i) for i in range(table.shape[1])]
    )
    if table.shape[1] * table.shape[2] <= 8:
        series = [
            Series(name=f"layer {names[layer]}, head {head}", x=steps, y=table[:, layer, head])
            for layer in range(table.shape[1]) for head in range(table.shape[2])
        ]  # fmt: skip
    else:
        series = [
            Series(name=f"layer {names[layer]}, largest head", x=steps, y=table[:, layer].max(axis=1))
            for layer in range(table.shape[1])
        ]
    limit = run.setting("optim.qk_clip", 0)
    lines = [(float(limit), f"QK-clip at {limit:g}")] if limit and np.nanmax(table) > limit / 20 else []
    return LineChart(
        title="Largest attention logit (MLA)", x_label="step", y_label="max logit", y_log=True, series=series, horizontals=lines,
        caption="A logit that grows without bound precedes divergence; QK-clip scales a head back when it crosses its line.",
    )  # fmt: skip


def _probed(run: Run, name: str, keep: int | None = None) -> list[tuple[int, np.ndarray]]:
    """(step, array) of all probes whose array has the last one's shape, thinned to a bounded number of cells."""
    found = [
        (probe.step, np.asarray(value, dtype=float)) for probe in run.probes if (value := probe.get(name)) is not None
    ]
    if not found:
        return []
    found = [(step, value) for step, value in found if value.shape == found[-1][1].shape]
    limit = keep or max(1, min(40, MAX_CELLS // found[-1][1].size))
    if limit == 1:
        return found[-1:]
    picked = np.unique(np.linspace(0, len(found) - 1, min(limit, len(found))).round().astype(int))
    return [found[i] for i in picked]


def compare_loss(runs: Sequence[Run]) -> Chart | None:
    """Smoothed training losses of several runs over tokens."""
    series = []
    for position, run in zip(_families(runs), runs):
        if not run.train:
            continue
        x, y = thin(
            run.column("tokens") / 1e6, smooth(run.column("loss"), max(5, min(50, len(run.train) // 20))), limit=500
        )
        series.append(Series(name=run.name, x=x, y=y, color=position))
    if not series:
        return None
    return LineChart(title="Training loss", x_label="million tokens", y_label="nats per token", series=series,
                     caption="Averages over steps; compare only runs with the same tokenizer, and look at the spread between seeds.")  # fmt: skip


def compare_bits(runs: Sequence[Run]) -> Chart | None:
    """Held-out bits per byte of several runs over tokens."""
    series = []
    for position, run in zip(_families(runs), runs):
        bits, steps = run.column("bits_per_byte", run.evals), run.column("step", run.evals)
        if np.isfinite(bits).any():
            per_step = float(run.setting("tokens_per_step", math.nan))
            series.append(Series(name=run.name, x=steps * per_step / 1e6, y=bits, color=position))
    if not series:
        return None
    lines = next((lines for run in runs if (lines := baselines(run))), [])
    return LineChart(title="Held-out bits per byte", x_label="million tokens", y_label="bits per byte", series=series, horizontals=lines,
                     caption="Comparable across tokenizers, as long as the held-out bytes are the same.")  # fmt: skip


def _families(runs: Sequence[Run]) -> list[int]:
    """Number of each run's family: runs that differ only in their seed share one, and a colour."""
    seen: dict[str, int] = {}
    keys = [
        repr({key: value for key, value in run.config.items() if key != "seed"}) if run.config else run.name
        for run in runs
    ]
    return [seen.setdefault(key, len(seen)) for key in keys]


def compare_final(runs: Sequence[Run]) -> Chart | None:
    """Final bits per byte of each run as bars."""
    named = [(run.name, final_bits(run)) for run in runs]
    if not any(math.isfinite(value) for _, value in named):
        return None
    return Bars(title="Final bits per byte", categories=[name for name, _ in named], groups=[("final", [value for _, value in named])],
                y_label="bits per byte", caption="Lower is better; the last full evaluation of each run.")  # fmt: skip


def final_bits(run: Run) -> float:
    """The run's last held-out bits per byte: of the summary, else of the last evaluation; NaN if there is none."""
    train = run.summary.get("train")
    value = train.get("val_bits_per_byte") if isinstance(train, dict) else None
    if isinstance(value, (int, float)):
        return float(value)
    bits = run.column("bits_per_byte", run.evals)
    bits = bits[np.isfinite(bits)]
    return float(bits[-1]) if len(bits) else math.nan
