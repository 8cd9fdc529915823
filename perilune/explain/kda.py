"""Kimi Delta Attention: a memory of fixed size that forgets by channel and corrects instead of adding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from perilune.explain.chart import Bars, LineChart, Ridges, Series
from perilune.explain.explanation import Explanation
from perilune.explain.subject import Subject
from perilune.model.kda import KDA
from perilune.model.probe import probe
from perilune.model.state import RecurrentState
from perilune.ops.kda import recurrent_kda_reference
from perilune.ops.kda.reference import _recur


def explain(subject: Subject) -> Explanation:
    """Write and overwrite a value, read it back; state energy along the text; half-lives of the model's channels."""
    layers = list(subject.mixers(KDA))
    delta, added = overwrite(erase=True), overwrite(erase=False)
    energy = state_energy(subject)
    half_lives = np.asarray(probe(subject.model, subject.ids_BT)["kda_half_life"])
    medians = [float(np.median(half_lives[i])) for i in range(len(layers))]
    steps = list(range(1, subject.ids_BT.shape[1] + 1))
    reads = ("a value stored", "overwritten by a new one", "32 tokens later")
    charts = [
        Bars(
            title="One key, two values: what does the key read back?",
            categories=reads,
            groups=[
                ("delta rule, old", delta["old"]),
                ("delta rule, new", delta["new"]),
                ("plain sum, old", added["old"]),
                ("plain sum, new", added["new"]),
            ],
            y_label="share of the old and of the new value",
            caption="After the second write the delta rule reads only the new value; a plain sum reads both. The decay then fades it.",
        ),
        LineChart(
            title="State energy along the text",
            series=[Series(name=f"layer {layer}", x=steps, y=energy[layer]) for layer in layers],
            x_label="token",
            y_label="mean square of the state",
            caption="The state has the same size after one token and after a million: it fills, then writing and forgetting balance.",
        ),
        Ridges(
            title="How long the channels remember",
            groups=[(f"layer {layer}", half_lives[i]) for i, layer in enumerate(layers)],
            x_label="half-life, tokens",
            caption="Each key channel has its own decay: left forgets within a few tokens, right keeps for long.",
        ),
    ]
    return Explanation(
        name="kda",
        title="Kimi Delta Attention (KDA)",
        source="K3 report §2.1.1, Eq. 1, 2, 5, 6",
        formula=(
            "q, k, v = SiLU(conv₄(W x)),  q and k of length 1,  β = σ(W_β x)",
            "g = −5 · σ(eᴬ (W↑W↓x + b))        one log-decay for each key channel, in (−5, 0)",
            "S ← Diag(eᵍ) S                     forget",
            "S ← S + β k (v − Sᵀk)ᵀ             correct what the state gets wrong about k",
            "o = Sᵀ q / √K                      read after the write",
        ),
        unusual=(
            "The state is a K×V matrix a head whatever the length of the text: no cache grows.",
            "Forgetting acts on channels, not on whole heads: one head holds short and long memories at once.",
            "The write subtracts what is already stored under the key, so storing again replaces instead of adding.",
            "The decay is bounded below by e⁻⁵, so 16 tokens stay inside the range of bf16 and every tile is a dense product.",
        ),
        reference=_recur,
        findings=[
            f"After an overwrite the delta rule reads {delta['old'][1]:.3f} of the old and {delta['new'][1]:.3f} of the new value; "
            f"a plain sum reads {added['old'][1]:.3f} and {added['new'][1]:.3f}.",
            f"After 32 more tokens with half-life 16, {delta['new'][2]:.3f} of the value is left.",
            *(f"Layer {layer}: median half-life {medians[i]:.1f} tokens." for i, layer in enumerate(layers)),
            *subject.only_if_trained(),
        ],
        numbers={
            "delta_rule": delta,
            "plain_sum": added,
            "state_numbers_per_layer": state_size(subject),
            "state_energy": {str(layer): energy[layer] for layer in layers},
            "half_life_median": {str(layer): medians[i] for i, layer in enumerate(layers)},
        },
        charts=charts,
        next=("perilune explain mla", "perilune bench kernels --device cpu"),
    )


def overwrite(*, erase: bool, key_dim: int = 16, value_dim: int = 16) -> dict[str, list[float]]:
    """Store a value, store another under the same key, wait 32 tokens; after each, project what the key reads on both.

    Args:
        erase: the delta rule; False adds without subtracting (linear attention), by writing under a rotated query.

    Returns:
        old, new: three shares each, 1 = the whole value.
    """
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(value_dim, value_dim, generator=generator, dtype=torch.float64)).Q
    first, second = basis[0], basis[1]
    key = torch.nn.functional.normalize(torch.randn(key_dim, generator=generator, dtype=torch.float64), dim=0)
    log_decay = torch.tensor(0.5, dtype=torch.float64).log() / 16

    def reads(tokens: list[tuple[Tensor, float, float]]) -> tuple[float, float]:
        """Run (value, β, g) tokens under `key`, then read; the last token writes nothing."""
        state = torch.zeros(1, 1, key_dim, value_dim, dtype=torch.float64)
        out = torch.zeros(value_dim, dtype=torch.float64)
        for value, beta, g in tokens:
            target = value if erase or beta == 0 else value + (state[0, 0] * float(torch.tensor(g).exp())).T @ key
            o, state = recurrent_kda_reference(
                key.view(1, 1, 1, -1), key.view(1, 1, 1, -1), target.view(1, 1, 1, -1),
                torch.full((1, 1, 1, key_dim), g, dtype=torch.float64), torch.full((1, 1, 1), beta, dtype=torch.float64),
                scale=1.0, initial_state=state, output_final_state=True,
            )  # fmt: skip
            out = o[0, 0, 0]
        return float(out @ first), float(out @ second)

    wait = [(torch.zeros(value_dim, dtype=torch.float64), 0.0, float(log_decay))] * 32
    stages = (
        [(first, 1.0, 0.0)],
        [(first, 1.0, 0.0), (second, 1.0, 0.0)],
        [(first, 1.0, 0.0), (second, 1.0, 0.0), *wait],
    )
    found = [reads(stage) for stage in stages]
    # Rounded to what fp64 can tell: a share of 1e-17 is zero.
    return {"old": [round(old, 12) + 0.0 for old, _ in found], "new": [round(new, 12) + 0.0 for _, new in found]}


@torch.no_grad()
def state_energy(subject: Subject) -> dict[int, list[float]]:
    """Mean square of each recurrent layer's state after every token of the text."""
    state = subject.model.new_state(1)
    energy: dict[int, list[float]] = {}
    for token in subject.ids_BT[0]:
        subject.model(token.view(1, 1), state, logits="none")
        for index, layer in enumerate(state.layers):
            if isinstance(layer, RecurrentState):
                energy.setdefault(index, []).append(float(layer.memory_BHVK.square().mean()))
    return energy


def state_size(subject: Subject) -> int:
    """Numbers in one layer's state, the convolution's window included."""
    kda = subject.cfg.kda
    assert kda is not None, "a model with KDA layers has kda settings"
    return kda.num_heads * kda.head_dim * kda.value_dim + kda.conv_width * (kda.conv_kernel - 1)
