"""Blocks of ours at their start, sublayer by sublayer, and the Jacobian of each at one token.

Shapes: B rows, T tokens, D width.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from normscope.claims.at_start import blocks_of
from normscope.claims.experiments import gaussian, jacobian
from normscope.linalg import layer_norm_jacobian
from normscope.nn import Attention, Cache, Context, Decoder, Residual, build
from normscope.nn.context import NOTHING

F64 = torch.float64
HEAD_WIDTH = 16
VOCAB = 256
INITS = {"xavier": "Xavier", "normal": "N(0, 0.02²)", "gpt2": "GPT-2", "torch": "PyTorch's own"}
"""Usual initialisations → in words."""
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """One branch F with its residual, y = LN(x + F(x)) or y = x + F(LN(x)), at what enters it.

    Attributes:
        name: the case, in words, such as "attention of block 3".
        x: what enters (1, T, D).
        branch: F, (B, T, D) → (B, T, D).
        residual: the norms and the sum around it.
    """

    name: str
    x: Tensor
    branch: Map
    residual: Residual

    def apply(self, u_BTD: Tensor, context: Context = NOTHING) -> Tensor:
        """F(u)."""
        return self.branch(u_BTD, context) if isinstance(self.branch, Attention) else self.branch(u_BTD)

    def __call__(self, x_BTD: Tensor, context: Context = NOTHING, *, cut: bool = False) -> Tensor:
        """The stream after it (B, T, D); `cut` lets no gradient back through the branch."""

        def branch(u_BTD: Tensor) -> Tensor:
            return self.apply(u_BTD, context).detach() if cut else self.apply(u_BTD, context)

        found = self.residual(x_BTD, branch)
        assert isinstance(found, Tensor), "one stream"
        return found

    @property
    def joined(self) -> Tensor:
        """z = x + F(x) (1, T, D), which the norm of Post-LN reads."""
        with torch.no_grad():
            return self.x + self.apply(self.x)

    @property
    def norm(self) -> nn.LayerNorm:
        """The one norm."""
        (norm,) = (module for module in self.residual.norms.values() if isinstance(module, nn.LayerNorm))
        return norm

    def norm_jacobians(self, z_1TD: Tensor) -> Tensor:
        """J_LN(z) [T, D, D] of each token of z."""
        return layer_norm_jacobian(z_1TD[0], self.norm.weight.detach(), self.norm.eps)


def started(
    scheme: str,
    *,
    depth: int,
    width: int,
    seed: int,
    tokens: int = 16,
    dtype: torch.dtype = F64,
    **options: Any,
) -> tuple[Decoder, Tensor]:
    """A decoder at its start, and ids (1, T), all from `seed`."""
    torch.manual_seed(seed)
    given = {"heads": max(1, width // HEAD_WIDTH), "vocab": VOCAB, "context": tokens} | options
    model = build("decoder", scheme=scheme, depth=depth, width=width, **given)
    assert isinstance(model, Decoder)
    return model.to(dtype).eval().requires_grad_(False), torch.randint(VOCAB, (1, tokens))


def walk(model: nn.Module, x_1TD: Tensor) -> tuple[list[Layer], Tensor]:
    """Every sublayer at what enters it where `x_1TD` enters the first, and what leaves the last."""
    found = []
    with torch.no_grad():
        for number, block in enumerate(blocks_of(model), 1):
            for kind, (branch, residual) in block.sublayers().items():
                found.append(Layer(f"{kind} of block {number}", x_1TD, branch, residual))
                x_1TD = found[-1](x_1TD)
    return found, x_1TD


def one_token(model: nn.Module, width: int, seed: int) -> tuple[list[Layer], Tensor]:
    """`walk` of a token of N(0, 1) by itself."""
    return walk(model, gaussian(seed, 1, 1, width))


def sublayers(model: Decoder, ids: Tensor) -> list[Layer]:
    """Every sublayer at what enters it where the model reads `ids`."""
    return walk(model, embedded(model, ids))[0]


@torch.no_grad()
def embedded(model: Decoder, ids: Tensor) -> Tensor:
    """The stream that enters the first block (B, T, D)."""
    return model.embedding(ids, torch.arange(ids.shape[1])[None])


def at_last_token(step: Callable[..., Tensor], x_1TD: Tensor) -> tuple[Map, Tensor]:
    """The last token after `step` as a function (1, D) → (1, D) of the last token before, the others held;
    and where it stands (1, D). The step must be causal: earlier tokens are handed on in a cache.
    """
    earlier = Cache()
    if x_1TD.shape[1] > 1:
        with torch.no_grad():
            step(x_1TD[:, :-1], Context(cache=earlier))
    return lambda x_1D: step(x_1D[None], Context(cache=Cache(earlier)))[0], x_1TD[:, -1]


def product(factors: Iterable[Tensor]) -> Tensor:
    """J_L ⋯ J_1 of factors J_1 first."""
    return reduce(lambda whole, factor: factor @ whole, factors)


def step_jacobian(layer: Layer) -> Tensor:
    """The layer's Jacobian [D, D] at the last token."""
    return jacobian(*at_last_token(layer, layer.x))


def plain_branch_jacobian(layer: Layer) -> Tensor:
    """J_F(x) [D, D] at the last token, with no norm before F."""
    return jacobian(*at_last_token(layer.apply, layer.x))


def branch_jacobian(layer: Layer) -> Tensor:
    """A = J_F(LN(x)) · J_LN(x) at the last token of a Pre-LN layer."""
    with torch.no_grad():
        u = layer.norm(layer.x)
    return jacobian(*at_last_token(layer.apply, u)) @ layer.norm_jacobians(layer.x)[-1]
