"""`Block`: attention, optional cross-attention and feed-forward, each with its residual.

Shapes: B batch, T tokens, D width.
"""

import dataclasses

from torch import nn

from normscope.errors import UsageError
from normscope.nn.attention import Attention
from normscope.nn.config import ModelConfig
from normscope.nn.context import NOTHING, Context
from normscope.nn.feed_forward import FeedForward, default_hidden
from normscope.nn.initialise import initialise_block
from normscope.nn.joins import State
from normscope.nn.norms import LEAKING
from normscope.nn.placement import Kind, Where
from normscope.nn.residual import Residual, inner_norm_maker
from normscope.nn.schemes import scheme_named


class Block(nn.Module):
    """One block of a stack, with the scheme's initial weights.

    Args:
        config: widths, heads, norms and so on.
        where: place of the block, such as `Where(3, depth=24)`; the depth may be left out if the scheme does
            not depend on it.
        causal: whether a token sees only itself and earlier ones.
        cross: whether there is cross-attention to `context.memory`.
    """

    def __init__(self, config: ModelConfig, where: Where, *, causal: bool, cross: bool = False) -> None:
        super().__init__()
        scheme = scheme_named(config.scheme)
        inside = config.inside()
        make_norm = inner_norm_maker(scheme, config.norm, config.eps)
        if causal and (config.norm or scheme.norm) in LEAKING:
            raise UsageError(
                f'norm="{config.norm or scheme.norm}" in a causal stack',
                "a norm whose statistics do not include later tokens",
                "choose another norm, or an encoder",
            )

        def attention(*, cross: bool) -> Attention:
            return Attention(
                config.width,
                config.num_heads,
                causal=causal and not cross,
                cross=cross,
                kv_heads=config.kv_heads,
                head_width=config.head_width,
                rope_base=config.rope_base if config.positions == "rotary" and not cross else None,
                softcap=config.softcap,
                scale=config.logit_scale(inside),
                bias=config.bias,
                dropout=config.dropout,
                inside=inside,
                first=where.block == 1,
                keeps_largest=config.qk_clip is not None,
                make_norm=make_norm,
            )

        def residual(where: Where) -> Residual:
            return Residual(
                scheme,
                where,
                config.width,
                norm=config.norm,
                eps=config.eps,
                dropout=config.dropout,
                warmup=config.residual_warmup,
            )

        hidden = config.hidden or default_hidden(config.width, config.activation)
        places = sublayer_places(where, cross=cross)
        self.attention = attention(cross=False)
        self.attention_residual = residual(places["attention"])
        self.cross = attention(cross=True) if cross else None
        self.cross_residual = residual(places["cross-attention"]) if cross else None
        self.feed_forward = FeedForward(
            config.width,
            hidden,
            activation=config.activation,
            bias=config.bias,
            gained=inside.hidden_gain,
            inner_norm=make_norm(hidden) if inside.before_down else None,
            linear=inside.linear,
        )
        self.feed_forward_residual = residual(places["feed-forward"])
        with scheme.asking_for_depth():
            initialise_block(
                self.sublayers(),
                {kind: place.starting for kind, place in places.items()},
                scheme.initialisation,
                config.init,
                hidden_scale=config.width_multiplier**-0.5,
            )

    def forward(self, state: State, context: Context = NOTHING) -> State:
        """The next state; with one stream, (B, T, D) → (B, T, D)."""
        state = self.attention_residual(state, lambda x: self.attention(x, context), context.real)
        if self.cross is not None and self.cross_residual is not None:
            cross = self.cross
            state = self.cross_residual(state, lambda x: cross(x, context), context.real)
        return self.feed_forward_residual(state, self.feed_forward, context.real)

    def sublayers(self) -> dict[Kind, tuple[nn.Module, Residual]]:
        """Each branch with its residual, in order."""
        held: dict[Kind, tuple[nn.Module, Residual]] = {
            "attention": (self.attention, self.attention_residual)
        }
        if self.cross is not None and self.cross_residual is not None:
            held["cross-attention"] = (self.cross, self.cross_residual)
        held["feed-forward"] = (self.feed_forward, self.feed_forward_residual)
        return held


def sublayer_places(block: Where, *, cross: bool) -> dict[Kind, Where]:
    """Place of each branch of a block, by kind."""
    kinds: list[Kind] = ["attention", "cross-attention", "feed-forward"]
    if not cross:
        kinds.remove("cross-attention")
    return {
        kind: dataclasses.replace(block, kind=kind, index=index, per_block=len(kinds))
        for index, kind in enumerate(kinds)
    }
