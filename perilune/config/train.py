"""How a model is trained: data, batch, schedule, optimizer, checkpoints, evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field

from perilune.config.model import ModelConfig
from perilune.errors import ConfigError

OPTIMIZERS = ("muon", "muon_whole", "adamw")
PRECISIONS = ("auto", "fp32", "bf16")
ON_BAD_TEXT = ("error", "skip", "replace")
TOKENIZERS = ("bpe", "byte")
QUANT_WEIGHTS = ("none", "mxfp4")
QUANT_ACTIVATIONS = ("none", "mxfp8")
SCALE_RULES = ("floor", "even", "ceil")
DRAWN = ("shape", "shapes", "words", "bars", "line", "grid", "boxes", "points", "emoji")
MAX_SEED = 2**32 - 1
MAX_THREADS = 1024
SYNTHETIC = ("recall", "needle", "copy", "palindrome", "state", "arithmetic", "whole_window")


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionDataConfig:
    """Pictures that are trained on together with the text from the first step (report §3.3); needs `model.vision`.

    Attributes:
        share: of the windows, that hold pictures with captions and answered questions instead of text; 0 = no pictures.
        kinds: what is drawn, in turn; a kind that is named twice comes twice as often.
        image_size: longest side in pixels that the vision tower sees; larger pictures are scaled down to it. A multiple of
            `model.vision.patch_size` times `model.vision.merge`.
        chat: share of the pictures that come in the chat format with a question, the others with a bare caption.
    """

    share: float = 0.0
    kinds: tuple[str, ...] = ("shape",)
    image_size: int = 56
    chat: float = 0.3

    def __post_init__(self) -> None:
        for name in ("share", "chat"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"data.vision.{name}={getattr(self, name)} must lie in [0, 1]")
        unknown = [name for name in self.kinds if name not in DRAWN]
        if unknown or not self.kinds:
            raise ConfigError(f"data.vision.kinds={list(self.kinds)} must name some of: {', '.join(DRAWN)}")
        if self.image_size < 1:
            raise ConfigError(f"data.vision.image_size={self.image_size} must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the text comes from.

    Attributes:
        path: files, directories or globs (txt, py, md, jsonl, parquet …); empty = the default corpus, the Python sources
            of the running interpreter's standard library.
        field: text field of jsonl and parquet rows.
        holdout: fraction of top-level modules (or documents) held out, chosen by a hash of their name.
        on_bad_text: what to do with a file that is not UTF-8: error | skip | replace.
        tokenizer: bpe (trained on the training part, stored in the run) | byte | path of a tokenizer.json.
        synthetic: synthetic tasks mixed in.
        synthetic_fraction: share of the windows that come from them.
        long_document_weight: up-sampling of long documents: a document of n tokens is repeated in proportion to
            (n / median)^weight, at most 4 times; 0 = off (report §3.4).
        vision: pictures mixed in.
    """

    path: tuple[str, ...] = ()
    field: str = "text"
    holdout: float = 0.1
    on_bad_text: str = "error"
    tokenizer: str = "bpe"
    synthetic: tuple[str, ...] = ()
    synthetic_fraction: float = 0.0
    long_document_weight: float = 0.0
    vision: VisionDataConfig = VisionDataConfig()

    def __post_init__(self) -> None:
        if not 0.0 < self.holdout < 1.0:
            raise ConfigError(f"data.holdout={self.holdout} must lie strictly between 0 and 1")
        if self.on_bad_text not in ON_BAD_TEXT:
            raise ConfigError(f"data.on_bad_text={self.on_bad_text!r} is not known; allowed: {', '.join(ON_BAD_TEXT)}")
        unknown = [name for name in self.synthetic if name not in SYNTHETIC]
        if unknown:
            raise ConfigError(f"data.synthetic has unknown tasks {unknown}; allowed: {', '.join(SYNTHETIC)}")
        if self.long_document_weight < 0:
            raise ConfigError(
                f"data.long_document_weight={self.long_document_weight} must not be negative (0 switches it off)"
            )
        if any(not path for path in self.path):
            raise ConfigError("data.path has an empty name; name files, folders or globs, or leave data.path out")
        if not 0.0 <= self.synthetic_fraction <= 1.0:
            raise ConfigError(f"data.synthetic_fraction={self.synthetic_fraction} must lie in [0, 1]")
        if self.synthetic_fraction > 0 and not self.synthetic:
            raise ConfigError("data.synthetic_fraction is above 0 but data.synthetic names no task; "
                              f"name some of: {', '.join(SYNTHETIC)}")  # fmt: skip
        if self.synthetic_fraction + self.vision.share > 1.0:
            raise ConfigError(
                f"data.synthetic_fraction={self.synthetic_fraction} and data.vision.share={self.vision.share} are more than 1 "
                "together; lower one of them"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Optimizer and schedule (report §2.5, §3.3).

    Attributes:
        name: muon (per head) | muon_whole (whole matrices) | adamw.
        lr_muon, lr_adamw: peak learning rates of the two kinds of groups.
        weight_decay: decoupled decay on matrices.
        momentum: Nesterov momentum of Muon.
        beta1, beta2, eps: AdamW.
        warmup: fraction of the steps with a linear warm-up.
        final_lr: learning rate at the end, as a fraction of the peak (cosine).
        grad_clip: global norm to which gradients are scaled down; 0 = off.
        qk_clip: largest pre-softmax logit of an MLA head, enforced after each step; 0 = off.
    """

    name: str = "muon"
    lr_muon: float = 0.02
    lr_adamw: float = 0.006
    weight_decay: float = 0.1
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    warmup: float = 0.01
    final_lr: float = 0.0
    grad_clip: float = 1.0
    qk_clip: float = 100.0

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ConfigError(f"optim.name={self.name!r} is not known; allowed: {', '.join(OPTIMIZERS)}")
        for name in ("lr_muon", "lr_adamw", "eps"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"optim.{name}={getattr(self, name)} must be above 0")
        for name in ("warmup", "final_lr"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"optim.{name}={getattr(self, name)} must lie in [0, 1]")
        for name in ("momentum", "beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(f"optim.{name}={getattr(self, name)} must lie in [0, 1): at 1 an average never moves")
        for name in ("weight_decay", "grad_clip", "qk_clip"):
            if getattr(self, name) < 0:
                raise ConfigError(f"optim.{name}={getattr(self, name)} must not be negative (0 switches it off)")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """One stage of the context curriculum: a window length, and the fraction of all steps spent with it."""

    seq_len: int
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise ConfigError(f"stages.seq_len={self.seq_len} must be at least 2")
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(f"stages.fraction={self.fraction} must lie in (0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to save: every N steps (0 = only at the end and on interrupt), and how many whole checkpoints to keep."""

    every: int = 0
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every < 0 or self.keep < 1:
            raise ConfigError(
                f"checkpoint.every={self.every} must be 0 or more and checkpoint.keep={self.keep} at least 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Evaluation on held-out text: every N steps (0 = only at the end) on this many tokens (0 = all of them)."""

    every: int = 0
    tokens: int = 65536
    final_tokens: int = 0

    def __post_init__(self) -> None:
        if min(self.every, self.tokens, self.final_tokens) < 0:
            raise ConfigError("eval.every, eval.tokens and eval.final_tokens must be 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantConfig:
    """Quantisation-aware training of the routed experts (report §4.1.4); everything else keeps its precision.

    Attributes:
        weights: none | mxfp4: expert weights pass through MXFP4 in every forward; the master weights stay fp32.
        activations: none | mxfp8: inputs of the experts' products pass through MXFP8. K3 was trained with mxfp4 and mxfp8
            (W4A8); weights alone are W4A16, the literal reading of its published configuration.
        rule: how a block's scale is chosen: floor (the standard's) | even | ceil (nothing saturates).
    """

    weights: str = "none"
    activations: str = "none"
    rule: str = "floor"

    def __post_init__(self) -> None:
        for name, allowed in (("weights", QUANT_WEIGHTS), ("activations", QUANT_ACTIVATIONS), ("rule", SCALE_RULES)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"quant.{name}={getattr(self, name)!r} is not known; allowed: {', '.join(allowed)}")

    @property
    def on(self) -> bool:
        """True if anything is rounded."""
        return self.weights != "none" or self.activations != "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A training run.

    Attributes:
        model, data, optim, quant, checkpoint, eval: the parts.
        stages: context curriculum in order; fractions sum to 1; tokens a step stay the same.
        steps: optimizer steps.
        tokens_per_step: tokens of one optimizer step (a multiple of every stage's seq_len).
        microbatch_tokens: tokens of one forward and backward; more than that accumulates gradients.
        precision: auto (bf16 where the CPU or GPU multiplies it fast) | fp32 | bf16 activations, fp32 parameters.
        fp32_attention_output: keep MLA's output in fp32 up to its gate (report §2.1.2).
        device: auto | cpu | cuda.
        threads: CPU threads, at most 1024; 0 = all cores that this process may use.
        cuda_graphs: auto (training steps on a GPU are recorded and replayed where they can be; no number changes) | off.
        seed: of the weights, the data order and the samples, from 0 to 2³² − 1.
        time_limit: seconds of training after which the run stops and saves; 0 = none.
        log_every, probe_every: steps between progress records and between probes of the model's inside (0 = end only).
    """

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    stages: tuple[StageConfig, ...] = (StageConfig(seq_len=256),)
    steps: int = 1000
    tokens_per_step: int = 2048
    microbatch_tokens: int = 2048
    precision: str = "auto"
    fp32_attention_output: bool = True
    device: str = "auto"
    threads: int = 0
    cuda_graphs: str = "auto"
    seed: int = 0
    time_limit: float = 0.0
    log_every: int = 1
    probe_every: int = 0

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigError(f"precision={self.precision!r} is not known; allowed: {', '.join(PRECISIONS)}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device={self.device!r} is not known; allowed: auto, cpu, cuda")
        if self.cuda_graphs not in ("auto", "off"):
            raise ConfigError(f"cuda_graphs={self.cuda_graphs!r} is not known; allowed: auto, off")
        for name in ("steps", "tokens_per_step", "microbatch_tokens", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("time_limit", "probe_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} must not be negative (0 switches it off)")
        if not 0 <= self.threads <= MAX_THREADS:
            raise ConfigError(f"threads={self.threads} must lie in 0 (all cores) to {MAX_THREADS}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ConfigError(f"seed={self.seed} must lie in 0 to {MAX_SEED}")
        if not self.stages:
            raise ConfigError("stages is empty; give at least one window length")
        total = sum(stage.fraction for stage in self.stages)
        if abs(total - 1.0) > 1e-6:
            raise ConfigError(f"the stages' fractions sum to {total:g}; they must sum to 1")
        for stage in self.stages:
            if self.tokens_per_step % stage.seq_len:
                below = self.tokens_per_step // stage.seq_len * stage.seq_len
                nearest = ", ".join(str(n) for n in (below, below + stage.seq_len) if n)
                raise ConfigError(f"tokens_per_step={self.tokens_per_step} must be a multiple of the window "
                                  f"seq_len={stage.seq_len} (nearest: {nearest})")  # fmt: skip
        self._check_vision()

    def _check_vision(self) -> None:
        """Pictures need a vision tower, and a size that it can cut into tokens."""
        if self.data.vision.share == 0.0:
            return
        if self.model.vision is None:
            raise ConfigError(
                f"data.vision.share={self.data.vision.share} needs a model with a vision tower, but model.vision is not set; "
                "use the preset nano_vision, or set data.vision.share to 0"
            )
        unit = self.model.vision.patch_size * self.model.vision.merge
        if self.data.vision.image_size % unit:
            raise ConfigError(
                f"data.vision.image_size={self.data.vision.image_size} must be a multiple of {unit}, the side of one image "
                f"token (model.vision.patch_size={self.model.vision.patch_size} times model.vision.merge="
                f"{self.model.vision.merge})"
            )
