"""What a K3-class model is: sizes, layer pattern, and which interchangeable part stands where.

Every value here is architecture. How the model is trained is in `config.train`. The published K3 values are in
`config.presets.k3`; field meanings follow spec sections of the K3 report (§2) and of the released configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from perilune.errors import ConfigError

MIXERS = ("kda", "gdn", "mla", "softmax")
GLOBAL_MIXERS = ("mla", "softmax")
RESIDUALS = ("plain", "full", "full_sublayer", "block")
ACTIVATIONS = ("situ", "swiglu")
BALANCERS = ("quantile", "quantile_exact", "dual", "sign", "none")


def _positive(owner: str, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigError(f"{owner}.{name}={value} must be at least 1")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} is not known; allowed: {', '.join(allowed)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class KDAConfig:
    """Kimi Delta Attention (report §2.1.1), and Gated DeltaNet as its one-decay-a-head ablation.

    Attributes:
        num_heads: heads H; the state of a head is `[value_head_dim, head_dim]`.
        head_dim: key channels K of a head.
        value_head_dim: value channels V of a head; None = head_dim.
        conv_kernel: taps of the causal short convolution.
        gate_lower_bound: g = bound * sigmoid(e^A z) (K3: -5); None = -e^A softplus(z) (Kimi-Linear).
        decay_rank: rank of the shared decay projection; None = head_dim.
        output_gate_rank: None = full-rank output gate (K3); a number = low-rank gate (Kimi-Linear: head_dim).
        stored_heads: length of A_log on disk (K3 stores 128 and uses 96); None = num_heads.
    """

    num_heads: int
    head_dim: int
    value_head_dim: int | None = None
    conv_kernel: int = 4
    gate_lower_bound: float | None = -5.0
    decay_rank: int | None = None
    output_gate_rank: int | None = None
    stored_heads: int | None = None

    def __post_init__(self) -> None:
        _positive("kda", num_heads=self.num_heads, head_dim=self.head_dim, value_head_dim=self.value_head_dim,
                  conv_kernel=self.conv_kernel, decay_rank=self.decay_rank, output_gate_rank=self.output_gate_rank)  # fmt: skip
        if self.gate_lower_bound is not None and not -5.0 <= self.gate_lower_bound < 0.0:
            raise ConfigError(
                f"kda.gate_lower_bound={self.gate_lower_bound} must lie in [-5, 0), or be none for the softplus form"
            )
        if self.stored_heads is not None and self.stored_heads < self.num_heads:
            raise ConfigError(f"kda.stored_heads={self.stored_heads} must be at least kda.num_heads={self.num_heads}")

    @property
    def value_dim(self) -> int:
        """Value channels V of a head."""
        return self.value_head_dim or self.head_dim

    @property
    def rank(self) -> int:
        """Rank of the decay projection."""
        return self.decay_rank or self.head_dim

    @property
    def key_width(self) -> int:
        """H*K, the width of q and of k."""
        return self.num_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """H*V, the width of v and of the output gate."""
        return self.num_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Channels of the short convolution: q, k and v side by side."""
        return 2 * self.key_width + self.value_width


@dataclass(frozen=True, kw_only=True, slots=True)
class MLAConfig:
    """Gated multi-head latent attention (report §2.1.2).

    Attributes:
        num_heads: heads H.
        q_lora_rank: rank of the query projection; None = full rank.
        kv_lora_rank: width of the cached latent.
        qk_nope_head_dim: key channels of a head rebuilt from the latent.
        qk_rope_head_dim: key channels shared by all heads; not rotated unless rope_theta is set.
        v_head_dim: value channels of a head.
        output_gate: multiply the attention output by sigmoid(W_g x) before the output projection.
        rope_theta: base of the rotary embedding on the shared channels; None = NoPE (K3, Kimi-Linear).
        lora_norm_eps: eps of the norms on both latents (the published code uses the class default 1e-6).
    """

    num_heads: int
    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool = True
    rope_theta: float | None = None
    lora_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _positive("mla", num_heads=self.num_heads, q_lora_rank=self.q_lora_rank, kv_lora_rank=self.kv_lora_rank,
                  qk_nope_head_dim=self.qk_nope_head_dim, v_head_dim=self.v_head_dim)  # fmt: skip
        if self.qk_rope_head_dim < 0:
            raise ConfigError(f"mla.qk_rope_head_dim={self.qk_rope_head_dim} must not be negative")
        if self.rope_theta is not None and (self.qk_rope_head_dim == 0 or self.qk_rope_head_dim % 2):
            raise ConfigError(
                f"mla.rope_theta is set, so mla.qk_rope_head_dim={self.qk_rope_head_dim} must be even and above 0"
            )

    @property
    def qk_head_dim(self) -> int:
        """Query and key channels of a head, rotated or not: the softmax scale is this to the power -1/2."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Numbers cached for each token: the latent and the shared key channels (K3: 576)."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftmaxConfig:
    """Plain multi-head softmax attention with rotary positions: a baseline mixer for ablations."""

    num_heads: int
    head_dim: int
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        _positive("softmax", num_heads=self.num_heads, head_dim=self.head_dim)
        if self.head_dim % 2:
            raise ConfigError(f"softmax.head_dim={self.head_dim} must be even for rotary positions")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Stable LatentMoE (report §2.3); without a latent it is the ordinary DeepSeek-style mixture.

    Attributes:
        num_experts: routed experts E.
        experts_per_token: experts A that each token visits.
        num_shared_experts: experts that every token visits, stored fused as one MLP.
        expert_size: hidden width F of one expert.
        latent_size: width of the latent space of the routed experts; None = model width, no projections, no norm.
        latent_norm: RMSNorm on the combined routed output before the up projection.
        renormalize: chosen weights sum to 1.
        routed_scaling_factor: factor on the routed weights (K3: 1).
        balancer: rule that updates the selection bias; see `ops.moe.balance`.
        balancer_ema: weight of the previous quantile in an exponential average; 0 = off.
        sign_update: step of the sign-updated bias (only balancer "sign").
    """

    num_experts: int
    experts_per_token: int
    num_shared_experts: int = 1
    expert_size: int
    latent_size: int | None = None
    latent_norm: bool = True
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    balancer: str = "quantile"
    balancer_ema: float = 0.0
    sign_update: float = 1e-3

    def __post_init__(self) -> None:
        _positive("moe", num_experts=self.num_experts, experts_per_token=self.experts_per_token,
                  expert_size=self.expert_size, latent_size=self.latent_size)  # fmt: skip
        _one_of("moe.balancer", self.balancer, BALANCERS)
        if self.num_shared_experts < 0:
            raise ConfigError(f"moe.num_shared_experts={self.num_shared_experts} must not be negative")
        if self.experts_per_token >= self.num_experts:
            raise ConfigError(
                f"moe.experts_per_token={self.experts_per_token} must be below moe.num_experts={self.num_experts}: "
                "the router needs a (k+1)-th expert for its cutoff; lower experts_per_token or add experts"
            )
        if not 0.0 <= self.balancer_ema < 1.0:
            raise ConfigError(f"moe.balancer_ema={self.balancer_ema} must lie in [0, 1)")


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig:
    """MoonViT-V2 and its projector (report §2.4; architecture §8). Every linear map is without bias.

    Attributes:
        hidden_size: width D of the tower.
        num_layers: blocks.
        num_heads: attention heads H.
        head_dim: channels K of a head; H*K may differ from D (published: 1536 and 1024). A multiple of 4: half of the
            rotated pairs follow x, half y.
        mlp_size: hidden width of a block's MLP.
        patch_size: side p of a square patch in pixels.
        position_grid: side of the learned table of positions, which is resized to each image's grid.
        max_frames: frames of one item that attend to each other and are pooled into the tokens of one image.
        merge: side of the square of patches that becomes one token.
        norm_eps: eps of the tower's RMSNorms; None = the smallest step of the compute dtype at 1, which is what the
            published modules use (bf16: 2^-7 = 0.0078125; fp32: 1.2e-7). Published weights run in fp32 therefore need
            norm_eps=0.0078125 to give the numbers of the published bf16 model. The projector's norm always has 1e-5.
    """

    hidden_size: int = 1024
    num_layers: int = 27
    num_heads: int = 12
    head_dim: int = 128
    mlp_size: int = 4096
    patch_size: int = 14
    position_grid: int = 64
    max_frames: int = 4
    merge: int = 2
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        _positive("vision", **{f.name: getattr(self, f.name) for f in fields(self) if f.name != "norm_eps"})
        if self.head_dim % 4:
            raise ConfigError(
                f"vision.head_dim={self.head_dim} must be a multiple of 4: channel pairs alternate x and y"
            )
        if self.hidden_size % 2:
            raise ConfigError(f"vision.hidden_size={self.hidden_size} must be even: the time code is sines and cosines")
        if self.norm_eps is not None and not self.norm_eps > 0.0:
            raise ConfigError(f"vision.norm_eps={self.norm_eps} must be above 0, or none for that of the compute dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A whole model.

    Attributes:
        vocab_size: tokens Z, special ones included.
        hidden_size: model width D.
        num_layers: decoder layers.
        mixer: sequence mixer of the ordinary layers: kda | gdn | mla | softmax.
        global_mixer: mixer of every `global_every`-th layer and of the last one: mla | softmax.
        global_every: period of the global layers (K3: 4, so three KDA layers for one MLA layer).
        residual: plain | full (sources are whole decoder layers) | full_sublayer (every attention and MLP output is a
            source, report Eq. 8) | block (report Eq. 10).
        attn_res_block_layers: decoder layers in a block of the block residual (K3: 12).
        activation: gated unit of every MLP and expert: situ | swiglu.
        situ_beta, situ_linear_beta: the two caps of SiTU-GLU (K3: 4 and 25).
        dense_layers: leading layers with a dense MLP instead of experts.
        dense_size: hidden width of the dense MLP.
        norm_eps: eps of every RMSNorm except the MLA latents' and the L2 norms'.
        init_range: standard deviation of the initial weights.
        kda, mla, softmax, moe, vision: settings of the parts; a part that the pattern uses must be set.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    mixer: str = "kda"
    global_mixer: str = "mla"
    global_every: int = 4
    residual: str = "block"
    attn_res_block_layers: int = 12
    activation: str = "situ"
    situ_beta: float = 4.0
    situ_linear_beta: float | None = 25.0
    dense_layers: int = 1
    dense_size: int
    norm_eps: float = 1e-5
    init_range: float = 0.02
    kda: KDAConfig | None = None
    mla: MLAConfig | None = None
    softmax: SoftmaxConfig | None = None
    moe: MoEConfig | None = None
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        _positive("model", vocab_size=self.vocab_size, hidden_size=self.hidden_size, num_layers=self.num_layers,
                  global_every=self.global_every, attn_res_block_layers=self.attn_res_block_layers,
                  dense_size=self.dense_size)  # fmt: skip
        _one_of("model.mixer", self.mixer, MIXERS)
        _one_of("model.global_mixer", self.global_mixer, GLOBAL_MIXERS)
        _one_of("model.residual", self.residual, RESIDUALS)
        _one_of("model.activation", self.activation, ACTIVATIONS)
        if not 0 <= self.dense_layers <= self.num_layers:
            raise ConfigError(
                f"model.dense_layers={self.dense_layers} must lie in 0..model.num_layers={self.num_layers}"
            )
        for kind in set(self.layer_mixers):
            part = "kda" if kind in ("kda", "gdn") else kind
            if getattr(self, part) is None:
                raise ConfigError(f"the layer pattern uses the mixer {kind!r}, but model.{part} is not set")
        if self.dense_layers < self.num_layers and self.moe is None:
            raise ConfigError(f"layers {self.dense_layers}..{self.num_layers - 1} have experts, but model.moe is not set; "
                              f"set it, or model.dense_layers={self.num_layers} for a dense model")  # fmt: skip

    @property
    def layer_mixers(self) -> tuple[str, ...]:
        """Mixer of each layer: every `global_every`-th and the last are global (report §2.1; K3: 69 KDA, 24 MLA)."""
        last = self.num_layers - 1
        return tuple(
            self.global_mixer if (layer + 1) % self.global_every == 0 or layer == last else self.mixer
            for layer in range(self.num_layers)
        )

    @property
    def layer_ffns(self) -> tuple[str, ...]:
        """Feed-forward of each layer: "dense" or "moe"."""
        return tuple("dense" if layer < self.dense_layers else "moe" for layer in range(self.num_layers))

    @property
    def num_attn_res_blocks(self) -> int:
        """Slots of the bank of the block residual: the embedding and each finished block that a later layer reads."""
        return -(-self.num_layers // self.attn_res_block_layers)
