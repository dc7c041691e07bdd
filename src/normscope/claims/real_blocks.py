"""Blocks of ours at their start, sublayer by sublayer, and the Jacobian of each at one token.

Shapes: B rows, T tokens, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from normscope.claims.at_start import blocks_of
from normscope.claims.experiments import gaussian
from normscope.linalg import layer_norm_jacobian
from normscope.nn import Attention, Cache, Context, Decoder, Residual, build
from normscope.nn.context import NOTHING

F64 = torch.float64
HEAD_WIDTH = 16
VOCAB = 256
INITS = {"xavier": "Xavier", "normal": "N(0, 0.02²)", "gpt2": "GPT-2", "torch": "PyTorch's own"}
"""Usual initialisations → in words."""
Step = Callable[[Tensor, Context], Tensor]
"""(B, T, D) → (B, T, D), given what else a block needs."""


@dataclass(frozen=True)
class Sublayer:
    """One branch with its residual, at what enters it.

    Attributes:
        block: its number, from 1.
        kind: "attention" or "feed-forward".
        branch: F.
        residual: the norms and the sum around it.
        x: what enters (1, T, D).
    """

    block: int
    kind: str
    branch: nn.Module
    residual: Residual
    x: Tensor

    def apply(self, u_BTD: Tensor, context: Context = NOTHING) -> Tensor:
        """F(u)."""
        return self.branch(u_BTD, context) if isinstance(self.branch, Attention) else self.branch(u_BTD)

    def step(self, x_BTD: Tensor, context: Context = NOTHING) -> Tensor:
        """The stream after it."""
        return self.residual(x_BTD, lambda u: self.apply(u, context))

    @property
    def joined(self) -> Tensor:
        """z = x + F(x) (1, T, D), which the norm of Post-LN reads."""
        with torch.no_grad():
            return self.x + self.apply(self.x)

    def norm(self, slot: str) -> tuple[Tensor | None, float]:
        """γ and ε of the LayerNorm in a slot."""
        norm = self.residual.norms[slot]
        assert isinstance(norm, nn.LayerNorm), f"no LayerNorm in {slot}"
        return norm.weight.detach(), norm.eps


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


def walk(model: nn.Module, x_1TD: Tensor) -> tuple[list[Sublayer], Tensor]:
    """Every sublayer at what enters it where `x_1TD` enters the first, and what leaves the last."""
    found = []
    with torch.no_grad():
        for number, block in enumerate(blocks_of(model), 1):
            for kind, (branch, residual) in block.sublayers().items():
                found.append(Sublayer(number, kind, branch, residual, x_1TD))
                x_1TD = found[-1].step(x_1TD)
    return found, x_1TD


def one_token(model: nn.Module, width: int, seed: int) -> tuple[list[Sublayer], Tensor]:
    """`walk` of a token of N(0, 1) by itself."""
    return walk(model, gaussian(seed, 1, 1, width))


def sublayers(model: Decoder, ids: Tensor) -> list[Sublayer]:
    """Every sublayer at what enters it where the model reads `ids`."""
    return walk(model, embedded(model, ids))[0]


@torch.no_grad()
def embedded(model: Decoder, ids: Tensor) -> Tensor:
    """The stream that enters the first block (B, T, D)."""
    return model.embedding(ids, torch.arange(ids.shape[1])[None])


def at_last_token(step: Step, x_1TD: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The last token after `step` as a function (B, D) → (B, D) of the last token before, the others held;
    and where it stands (D,). The step must be causal: earlier tokens are handed on in a cache.
    """
    earlier = Cache()
    if x_1TD.shape[1] > 1:
        with torch.no_grad():
            step(x_1TD[:, :-1], Context(cache=earlier))

    def f(x_BD: Tensor) -> Tensor:
        rows = len(x_BD)
        held = {
            key: (k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1)) for key, (k, v) in earlier.items()
        }
        return step(x_BD.unsqueeze(1), Context(cache=Cache(held))).squeeze(1)

    return f, x_1TD[0, -1]


def jacobian(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """∂f/∂x [D, D] by autograd: D copies of x (D,) as rows, each asked for another output."""
    copies = x.expand(len(x), -1).clone().requires_grad_()
    with torch.enable_grad():
        y = f(copies)
    return torch.autograd.grad(y, copies, torch.eye(len(x), dtype=x.dtype))[0]


def product(factors: Sequence[Tensor]) -> Tensor:
    """J_L ⋯ J_1 of factors J_1 first."""
    return reduce(lambda whole, factor: factor @ whole, factors)


def step_jacobian(sublayer: Sublayer) -> Tensor:
    """The sublayer's Jacobian [D, D] at the last token."""
    return jacobian(*at_last_token(sublayer.step, sublayer.x))


def norm_jacobian(sublayer: Sublayer) -> Tensor:
    """J_LN(z) [T, D, D] of each token of a Post-LN sublayer."""
    return layer_norm_jacobian(sublayer.joined[0], *sublayer.norm("stream"))


def plain_branch_jacobian(sublayer: Sublayer) -> Tensor:
    """J_F(x) [D, D] at the last token, with no norm before F."""
    return jacobian(*at_last_token(sublayer.apply, sublayer.x))


def branch_jacobian(sublayer: Sublayer) -> Tensor:
    """A = J_F(LN(x)) · J_LN(x) at the last token."""
    weight, eps = sublayer.norm("branch_in")
    with torch.no_grad():
        u = sublayer.residual.norms["branch_in"](sublayer.x)
    of_branch = jacobian(*at_last_token(sublayer.apply, u))
    return of_branch @ layer_norm_jacobian(sublayer.x[0, -1], weight, eps)
