"""`ModelConfig`: configuration of the models, checked on creation."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from normscope.checks import Rule, count, number, one_of
from normscope.errors import UsageError
from normscope.nn.feed_forward import ACTIVATIONS, GATED
from normscope.nn.norms import NORMS
from normscope.nn.scheme import AttentionGate, Inside, QKNorm, ValueResidual
from normscope.nn.schemes import scheme_named
from normscope.nn.weights import WEIGHTS

DEFAULT_DEPTH = 12
_INSIDE = ("qk_norm", "attention_gate", "value_residual")
"""Fields of `Inside` that can be configured."""
POSITIONS = ("learnt", "rotary", "sinusoidal", "none")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Configuration of a normscope model.

    Attributes:
        scheme: a name of `SCHEMES`.
        depth: number of blocks; 12 by default, except for schemes whose formula depends on it.
        encoder_depth: blocks of an encoder–decoder's encoder; `depth` by default.
        width: D.
        heads: attention heads; by default one per 64 features.
        kv_heads, head_width: as for `Attention`.
        hidden: width inside the feed-forward; by default 4·width, or two thirds of that if it is gated.
        vocab: number of token ids.
        context: largest number of tokens in a sequence with learnt positions.
        image, patch: side of an image and of its patches, in pixels.
        channels, classes: numbers of channels and of classes of the images.
        norm: a kind of `NORMS`; by default the scheme's own, else "layernorm".
        eps: the norms' ε.
        positions, rope_base: one of `POSITIONS`; base of the rotary angles.
        activation: a name of `ACTIVATIONS` or `GATED`.
        qk_norm, attention_gate, value_residual: as in `Inside`; the scheme's by default.
        qk_clip: τ of QK-clip, which `after_step` applies: it scales W_q and W_k of each head whose largest
            logit in the step was over τ (100 in Kimi K2); None for none.
        softcap, output_softcap: c of c·tanh(logit/c), for attention logits and output logits; None for none.
        attention_scale: scale of the attention logits; 1/√head_width by default.
        residual_warmup: T of a progressive residual warm-up (ProRes), as for `Residual`; 1000 in the paper.
        dropout: dropout rate after the embedding, in the attention and on each branch.
        bias: whether the linear maps have a bias.
        output_bias: bias of the output logits: true, false, or "unigram" (the log frequencies of a text).
        z_loss: weight of log² Z in the loss of train mode, Z the sum of the exponentiated logits; 1e-4 in
            PaLM (Chowdhery et al. 2022, arXiv:2204.02311).
        tie: whether the head shares the embedding's weights.
        init: initialisation, a name of `WEIGHTS`; the scheme's own by default.
        entry_norm, final_norm: whether there is a norm before the first block, and after the last one; the
            scheme's own by default.
        checkpoint: keep only the blocks' inputs for the backward pass, and run each block twice.
        fused: compute each residual add together with the norm that reads it (`kernels.residual_norm`), where
            the join is the plain or scaled sum and the norm a LayerNorm or RMSNorm.
        base_depth, base_width: depth and width at which a μP model's learning rate was tuned.

    Raises:
        UsageError: a value is invalid.
    """

    scheme: str = "pre"
    depth: int | None = None
    encoder_depth: int | None = None
    width: int = 256
    heads: int | None = None
    kv_heads: int | None = None
    head_width: int | None = None
    hidden: int | None = None
    vocab: int = 256
    context: int = 1024
    image: int = 32
    patch: int = 4
    channels: int = 3
    classes: int = 10
    norm: str | None = None
    eps: float = 1e-5
    positions: str = "learnt"
    rope_base: float = 10_000.0
    activation: str = "gelu"
    qk_norm: QKNorm | None = None
    attention_gate: AttentionGate | None = None
    value_residual: ValueResidual | None = None
    qk_clip: float | None = None
    softcap: float | None = None
    output_softcap: float | None = None
    attention_scale: float | None = None
    residual_warmup: int | None = None
    dropout: float = 0.0
    bias: bool = True
    output_bias: bool | Literal["unigram"] = False
    z_loss: float = 0.0
    tie: bool = False
    init: str | None = None
    entry_norm: bool | None = None
    final_norm: bool | None = None
    checkpoint: bool = False
    fused: bool = False
    base_depth: int = 2
    base_width: int = 256

    def __post_init__(self) -> None:
        scheme_named(str(self.scheme))
        for name, rule in RULES.items():
            rule.require(name, getattr(self, name))
        inside = self.inside()
        undone = "qk_norm" if inside.qk_norm else "sigma-reparam" if inside.linear == "sigma" else None
        if self.qk_clip is not None and undone is not None:
            expected = "logits that depend on the size of q's and k's weights"
            raise UsageError(f"qk_clip with {undone}", expected, "leave one of the two out")

    @property
    def num_blocks(self) -> int:
        """The depth, by default 12."""
        return DEFAULT_DEPTH if self.depth is None else self.depth

    @property
    def num_heads(self) -> int:
        """The number of heads; by default one per 64 features, or the next smaller divisor of the width."""
        if self.heads is not None:
            return self.heads
        return next(heads for heads in range(max(1, self.width // 64), 0, -1) if self.width % heads == 0)

    @property
    def mup(self) -> bool:
        """True for a model in μP."""
        return WEIGHTS[self.init or scheme_named(self.scheme).initialisation.weights].mup

    @property
    def width_multiplier(self) -> float:
        """μP's width/base_width; 1 in other models."""
        return self.width / self.base_width if self.mup else 1.0

    def logit_scale(self, inside: Inside) -> float | None:
        """Scale of the attention logits: the configured one, μP's 1/K, or None for the default."""
        if self.attention_scale is not None or not self.mup or inside.qk_norm in ("cosine", "unit"):
            return self.attention_scale
        return 1 / (self.head_width or self.width // self.num_heads)

    def inside(self) -> Inside:
        """The scheme's changes to the branches, with the configured ones."""
        configured = {name: getattr(self, name) for name in _INSIDE if getattr(self, name) is not None}
        return dataclasses.replace(scheme_named(self.scheme).inside, **configured)


def _each(rule: Rule, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


def _named(choices: Iterable[str]) -> Rule:
    return dataclasses.replace(one_of(tuple(choices)), optional=True)


_COUNT = "a whole number from 1"
_FLAG = Rule(lambda value: isinstance(value, bool), "true or false", "change it")
_OVER_0 = number(lambda value: value > 0, "a number over 0", "change it", optional=True)
RULES: Mapping[str, Rule] = {
    **_each(count(1, _COUNT, "change it"), "width", "vocab", "context", "base_depth", "base_width"),
    **_each(count(1, _COUNT, "change it"), "image", "patch", "channels", "classes"),
    **_each(
        count(1, _COUNT, "change it", optional=True),
        *("residual_warmup", "depth", "encoder_depth", "heads", "kv_heads", "head_width", "hidden"),
    ),
    **_each(_FLAG, "bias", "tie", "checkpoint", "fused"),
    **_each(dataclasses.replace(_FLAG, optional=True), "entry_norm", "final_norm"),
    "output_bias": Rule(
        lambda value: value == "unigram" or isinstance(value, bool), 'true, false or "unigram"', "change it"
    ),
    "z_loss": number(lambda value: value >= 0, "a number from 0", "change it"),
    "eps": number(lambda value: value >= 0, "a number from 0", "change it"),
    "dropout": number(lambda value: 0 <= value < 1, "a number from 0, under 1", "change it"),
    "rope_base": number(lambda value: value > 1, "a number over 1", "change it"),
    **_each(_OVER_0, "qk_clip", "softcap", "output_softcap", "attention_scale"),
    "positions": one_of(POSITIONS),
    "activation": one_of((*ACTIVATIONS, *GATED)),
    "norm": _named(NORMS),
    "qk_norm": _named(get_args(QKNorm)),
    "attention_gate": _named(get_args(AttentionGate)),
    "value_residual": _named(get_args(ValueResidual)),
    "init": _named(WEIGHTS),
}
"""Field of `ModelConfig` → rule for its values."""
