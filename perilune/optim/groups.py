"""Which optimizer moves which parameter, and along which cuts: a pure function of name, shape and model config.

Report §2.5 states per-head Muon for the Q, K and V projections: the momentum is cut along the heads before it is
orthogonalised, because heads with large gradients would otherwise own the update of the whole matrix. Which other
matrices go to Muon, and cut how, is our choice; every `Treatment` carries its reason, `perilune inspect` prints them.

| parameter | treatment |
|---|---|
| qkv_proj, q_proj, q_b_proj, kv_b_proj, g_proj, g_b_proj, f_b_proj | Muon, one matrix a head; kv_b with its k and v rows apart |
| o_proj, q_a_proj, kv_a_proj, g_a_proj, f_a_proj, latent down and up, dense and shared MLP | Muon, whole |
| routed experts w1, w2, w3 | Muon, one matrix an expert |
| router, embedding, lm_head, b_proj, a_proj | AdamW with decay |
| vision: wqkv | Muon, one matrix a head of q, of k and of v |
| vision: wo, MLP, projector | Muon, whole |
| vision: patch embedding, table of positions | AdamW with decay |
| norms, convolution taps, A_log, dt_bias, AttnRes queries, anything with one row or column | AdamW without decay |
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from perilune.config.model import ModelConfig
from perilune.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cut:
    """Equal blocks of rows of a matrix: of the rows `start:stop`, every `stride` rows give the block
    `[offset, offset + rows)`, so `(stop - start) / stride` blocks of `rows` rows."""

    start: int
    stop: int
    stride: int
    offset: int
    rows: int

    @property
    def count(self) -> int:
        """Number of blocks."""
        return (self.stop - self.start) // self.stride


@dataclass(frozen=True, slots=True)
class Treatment:
    """How one parameter is updated.

    Attributes:
        rule: "muon" or "adamw".
        cuts: row blocks that Muon orthogonalises one by one, covering every row once; of the leading axis flattened into
            rows for a stack `[E, rows, columns]`. Empty for AdamW.
        decay: decoupled weight decay applies.
        reason: why, in words, with the report's section or "ours".
    """

    rule: str
    cuts: tuple[Cut, ...]
    decay: bool
    reason: str


def _heads(rows: int, block: int, start: int = 0) -> Cut:
    """Blocks of `block` rows in `start:start+rows`."""
    assert rows % block == 0, f"{rows} rows do not divide into heads of {block}"
    return Cut(start, start + rows, block, 0, block)


_WHOLE = {
    "o_proj": "mixes heads already: one matrix (ours)",
    "q_a_proj": "latent projection shared by the heads: one matrix (ours)",
    "kv_a_proj": "latent projection shared by the heads: one matrix (ours)",
    "g_a_proj": "low-rank factor shared by the heads: one matrix (ours)",
    "f_a_proj": "low-rank factor shared by the heads: one matrix (ours)",
    "down_proj": "MLP or latent projection: one matrix (ours)",
    "up_proj": "MLP or latent projection: one matrix (ours)",
    "gate_proj": "MLP: one matrix (ours)",
}
_ADAMW = {
    "embed": "a table of vectors, not a map (ours)",
    "lm_head": "rows are classes (ours)",
    "router": "rows are experts' scores (ours)",
    "b_proj": "one row a head (ours)",
    "a_proj": "one row a head (ours)",
}
_PER_HEAD = ("qkv_proj", "q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "g_proj", "g_b_proj", "f_b_proj")


def _mixer_of(name: str, cfg: ModelConfig) -> str:
    """Mixer kind of the layer that the parameter `layers.{l}.mixer.…` belongs to."""
    return cfg.layer_mixers[int(name.split(".")[1])]


def _head_cuts(name: str, part: str, rows: int, cfg: ModelConfig) -> tuple[Cut, ...]:
    """Cuts of a mixer projection along the heads."""
    kind = _mixer_of(name, cfg)
    if kind in ("kda", "gdn"):
        kda = cfg.kda
        assert kda is not None, f"{name}: layer has a {kind} mixer but the config has no kda"
        if part == "qkv_proj":
            keys, values = kda.key_width, kda.value_width
            return (_heads(2 * keys, kda.head_dim), _heads(values, kda.value_dim, start=2 * keys))
        return (_heads(rows, kda.head_dim if part == "f_b_proj" else kda.value_dim),)
    if kind == "mla":
        mla = cfg.mla
        assert mla is not None, f"{name}: layer has an mla mixer but the config has no mla"
        if part == "kv_b_proj":
            stride = mla.qk_nope_head_dim + mla.v_head_dim
            return (
                Cut(0, rows, stride, 0, mla.qk_nope_head_dim),
                Cut(0, rows, stride, mla.qk_nope_head_dim, mla.v_head_dim),
            )
        return (_heads(rows, mla.v_head_dim if part == "g_proj" else mla.qk_head_dim),)
    softmax = cfg.softmax
    assert softmax is not None, f"{name}: layer has a softmax mixer but the config has no softmax"
    return (_heads(rows, softmax.head_dim),)


def _whole_cuts(name: str, part: str, rows: int, cfg: ModelConfig) -> tuple[Cut, ...]:
    """Whole matrices: one, except that a fused q|k|v projection is three."""
    if part != "qkv_proj":
        return (Cut(0, rows, rows, 0, rows),)
    kind = _mixer_of(name, cfg)
    keys = cfg.kda.key_width if kind in ("kda", "gdn") else rows // 3  # type: ignore[union-attr]
    spans = ((0, keys), (keys, 2 * keys), (2 * keys, rows))
    return tuple(Cut(a, b, b - a, 0, b - a) for a, b in spans)


_VISION_WHOLE = ("wo", "fc0", "fc1", "0", "2")
_VISION_ADAMW = {
    "proj": "patch embedding: its input is pixels, like the embedding's (ours)",
    "pos_emb": "a table of vectors, not a map (ours)",
}


def _vision(name: str, shape: tuple[int, ...], cfg: ModelConfig, optimizer: str) -> Treatment:
    """Treatment of a parameter of the vision tower or the projector, by the same reasons as in the text model."""
    assert cfg.vision is not None, f"{name}: the config has no vision"
    part = name.split(".")[-2]
    if len(shape) == 1:
        return Treatment("adamw", (), False, "a vector, no decay (ours)")
    if part in _VISION_ADAMW:
        return Treatment("adamw", (), True, _VISION_ADAMW[part])
    if part != "wqkv" and part not in _VISION_WHOLE:
        raise ConfigError(f"no optimizer rule for the parameter {name} of shape {list(shape)}; add one to optim.groups")
    if optimizer == "adamw":
        return Treatment("adamw", (), True, "optim.name=adamw")
    rows = shape[0]
    if part != "wqkv":
        return Treatment(
            "muon", (_heads(rows, rows),), True, "MLP, projector or output of the heads: one matrix (ours)"
        )
    if optimizer == "muon":
        return Treatment("muon", (_heads(rows, cfg.vision.head_dim),), True, "one matrix a head (report §2.5)")
    return Treatment("muon", (_heads(rows, rows // 3),), True, "optim.name=muon_whole")


def treatment(name: str, shape: tuple[int, ...], cfg: ModelConfig, optimizer: str = "muon") -> Treatment:
    """Decide how the parameter `name` of shape `shape` is updated.

    Args:
        name: as in `Transformer.named_parameters()`.
        shape: its shape; experts are `[E, rows, columns]`.
        cfg: the model.
        optimizer: "muon" (per head) | "muon_whole" (whole matrices) | "adamw".

    Raises:
        ConfigError: `optimizer` is unknown, or no rule knows the parameter.
    """
    if optimizer not in ("muon", "muon_whole", "adamw"):
        raise ConfigError(f"optim.name={optimizer!r} is not known; allowed: muon, muon_whole, adamw")
    if name.startswith(("vision_tower.", "mm_projector.")):
        return _vision(name, shape, cfg, optimizer)
    words = name.split(".")
    part = words[-2] if words[-1] == "weight" else words[-1]
    is_expert = len(shape) == 3 and part in ("w1", "w2", "w3")
    is_matrix = is_expert or part in _WHOLE or part in _ADAMW or part in _PER_HEAD
    if not is_matrix:
        if len(shape) > 1 and part != "qkv_conv":
            raise ConfigError(
                f"no optimizer rule for the parameter {name} of shape {list(shape)}; add one to optim.groups"
            )
        return Treatment("adamw", (), False, "a vector or filter taps, no decay (ours)")
    if optimizer == "adamw":
        return Treatment("adamw", (), True, "optim.name=adamw")
    if part in _ADAMW:
        return Treatment("adamw", (), True, _ADAMW[part])
    rows, columns = prod(shape[:-1]), shape[-1]
    if is_expert:
        cuts, reason = (_heads(rows, shape[1]),), "one matrix an expert (ours)"
    elif part in _PER_HEAD and optimizer == "muon":
        cuts = _head_cuts(name, part, rows, cfg)
        named = part in ("qkv_proj", "q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
        reason = "one matrix a head (report §2.5)" if named else "one matrix a head (ours)"
    else:
        cuts = _whole_cuts(name, part, rows, cfg)
        reason = "optim.name=muon_whole" if part in _PER_HEAD else _WHOLE[part]
    if min(columns, *(cut.rows for cut in cuts)) == 1:
        return Treatment("adamw", (), True, "one row or column: nothing to orthogonalise (ours)")
    return Treatment("muon", cuts, True, reason)
