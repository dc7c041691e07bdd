"""`Decoder` and `Encoder`: Transformers that one reads from top to bottom.

Shapes: B batch, T tokens, D width, V vocabulary.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.errors import UsageError, suggest
from normscope.nn.attention import SelfAttention
from normscope.nn.feed_forward import FeedForward
from normscope.nn.initialise import initialise, with_weights
from normscope.nn.norms import NORMS
from normscope.nn.placement import WEIGHTS, Placement, Scheme, Slot, Where, scheme_named

POSITIONS = ("learnt", "rotary")
IGNORED = -100
"""The label of a position that does not count in the loss."""


@dataclass(frozen=True)
class ModelConfig:
    """What a model of ours is made of.

    Attributes:
        scheme: a name of `SCHEMES`.
        depth: number of blocks, each of attention and feed-forward.
        width: D.
        heads: attention heads; by default one for each 64 of the width.
        vocab: number of token ids.
        context: most tokens of a sequence with learnt positions.
        hidden: width inside the feed-forward, by default 4·width.
        norm: a kind of `NORMS`.
        eps: the norms' ε.
        positions: "learnt" or "rotary".
        dropout: after the embedding, in the attention and on each branch.
        bias: of the linear maps.
        init: weights other than the scheme's own: "xavier", "normal" or "torch".
        final_norm: whether the stack ends in a norm, where that is not as the scheme says.
    """

    scheme: str = "pre"
    depth: int = 12
    width: int = 256
    heads: int | None = None
    vocab: int = 256
    context: int = 1024
    hidden: int | None = None
    norm: str = "layernorm"
    eps: float = 1e-5
    positions: str = "learnt"
    dropout: float = 0.0
    bias: bool = True
    init: str | None = None
    final_norm: bool | None = None

    def __post_init__(self) -> None:
        for name in ("depth", "width", "vocab", "context", "heads", "hidden"):
            value = getattr(self, name)
            if name in ("heads", "hidden") and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name}={value!r}", "a whole number from 1", f"change {name}")
        for name, limit in (("eps", float("inf")), ("dropout", 1.0)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < limit:
                raise UsageError(f"{name}={value!r}", f"a number from 0, under {limit}", f"change {name}")
        for name in ("bias", "final_norm"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "final_norm" and value is None):
                raise UsageError(f"{name}={value!r}", "true or false", f"change {name}")
        _one_of("norm", self.norm, tuple(NORMS))
        _one_of("positions", self.positions, POSITIONS)
        if self.init is not None:
            _one_of("init", self.init, WEIGHTS)
        scheme_named(str(self.scheme))


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(
            f'{name}="{value}"',
            f"one of {', '.join(choices)}",
            suggest(str(value), choices, f"change {name}"),
        )


class Output(NamedTuple):
    """Logits (B, T, V), and the mean cross-entropy in nats where labels were given."""

    logits: Tensor
    loss: Tensor | None


class Block(nn.Module):
    """Attention, then feed-forward, each with the norms and the join of the scheme."""

    def __init__(self, config: ModelConfig, scheme: Scheme, where: Where, *, causal: bool) -> None:
        super().__init__()
        placement = scheme.placement_at(where)
        self.stream_scale = scheme.join.stream_scale(where)
        self.branch_scale = scheme.join.branch_scale(where)
        self.attention_norms = _slot_norms(config, placement)
        self.attention = SelfAttention(
            config.width,
            config.heads or max(1, config.width // 64),
            causal=causal,
            rotary=config.positions == "rotary",
            bias=config.bias,
            dropout=config.dropout,
        )
        self.feed_forward_norms = _slot_norms(config, placement)
        self.feed_forward = FeedForward(config.width, config.hidden or 4 * config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        x_BTD = self._sublayer(x_BTD, self.attention, self.attention_norms)
        return self._sublayer(x_BTD, self.feed_forward, self.feed_forward_norms)

    def _sublayer(self, x_BTD: Tensor, branch: nn.Module, norms: nn.ModuleDict) -> Tensor:
        """N_stream(α·x + β·N_out(F(N_in(x)))), with the identity in slots that hold no norm."""
        update_BTD = self.dropout(branch(norms["branch_in"](x_BTD)))
        update_BTD = norms["branch_out"](update_BTD)
        return norms["stream"](_scaled(x_BTD, self.stream_scale) + _scaled(update_BTD, self.branch_scale))


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else scale * x


def _slot_norms(config: ModelConfig, placement: Placement) -> nn.ModuleDict:
    slots = (Slot.BRANCH_IN, Slot.BRANCH_OUT, Slot.STREAM)
    return nn.ModuleDict({slot.value: _norm(config, slot in placement) for slot in slots})


def _norm(config: ModelConfig, present: bool) -> nn.Module:
    return NORMS[config.norm](config.width, config.eps) if present else nn.Identity()


class Transformer(nn.Module):
    """One stack from ids to logits. Use `Decoder` or `Encoder`."""

    causal: ClassVar[bool]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        scheme = scheme_named(config.scheme)
        last = Where(config.depth, config.depth)
        placement = scheme.placement_at(last)
        if config.final_norm is not None:
            placement = placement.with_final(config.final_norm)
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width) if config.positions == "learnt" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(config, scheme, dataclasses.replace(last, block=index), causal=self.causal)
            for index in range(1, config.depth + 1)
        )
        self.final_norm = _norm(config, Slot.FINAL in placement)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        initialise(self, with_weights(scheme.initialisation, config.init))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Output:
        """Logits for each token, and with labels the loss.

        Args:
            ids: (B, T) int64.
            labels: (B, T), what each position should say; −100 where it does not count.
        """
        x_BTD = self.tokens(ids)
        if self.positions is not None:
            num_tokens = ids.shape[1]
            if num_tokens > self.config.context:
                raise UsageError(
                    f"a sequence of {num_tokens} tokens",
                    f"at most context={self.config.context}",
                    "shorten it or set context",
                )
            x_BTD = x_BTD + self.positions(torch.arange(num_tokens, device=ids.device))
        x_BTD = self.dropout(x_BTD)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(self.final_norm(x_BTD))
        if labels is None:
            return Output(logits_BTV, None)
        return Output(
            logits_BTV, F.cross_entropy(logits_BTV.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        )


class Decoder(Transformer):
    """Causal language model: labels are the next ids."""

    causal = True


class Encoder(Transformer):
    """Masked language model: every token sees every other, labels are the ids under the masks."""

    causal = False


MODELS: dict[str, type[Transformer]] = {"decoder": Decoder, "encoder": Encoder}
"""What `nn:NAME` can build."""


def build(name: str, **options: object) -> Transformer:
    """The model `name` of `MODELS` with options of `ModelConfig`; UsageError for unknown names and values."""
    if name in ("encoder-decoder", "vision"):
        raise UsageError(
            f'model "nn:{name}"', f"one of {', '.join(MODELS)}", "this one is not there yet; use hf:"
        )
    if name not in MODELS:
        raise UsageError(
            f'model "nn:{name}"', f"one of {', '.join(MODELS)}", suggest(name, MODELS, "choose one of these")
        )
    known = [field.name for field in dataclasses.fields(ModelConfig)]
    for key in options:
        if key not in known:
            raise UsageError(
                f'option "{key}" of nn:{name}',
                f"one of {', '.join(known)}",
                suggest(key, known, "choose one of these"),
            )
    return MODELS[name](ModelConfig(**options))  # type: ignore[arg-type]  # __post_init__ checks
