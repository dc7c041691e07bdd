"""`Residual`: the norms and the join around one branch.

Shapes: B batch, T tokens, D width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn.joins import Site, State, Update, scaled
from normscope.nn.norms import OVER_TOKENS, NoNorm, norm_named
from normscope.nn.placement import Slot, Where
from normscope.nn.scheme import Scheme
from normscope.nn.schemes import scheme_named


class Residual(nn.Module):
    """Residual connection of one branch with the stream: `state = residual(state, branch)`.

    It takes any branch that maps (B, T, D) to (B, T, D), also a user's own.

    Args:
        scheme: the scheme or its name.
        where: the sublayer's place, for numbers that depend on it.
        width: D.
        norm: a name of `NORMS`; by default the scheme's own, else LayerNorm.
        eps: ε of the norms.
        dropout: dropout rate of the branch's output.
        warmup: T of a progressive residual warm-up; None for none. In step t of training, from 1, the output
            of a branch of block l is multiplied by min(t/(T·l), 1) (ProRes, Chen et al. 2026,
            arXiv:2603.05369; their code counts from 0, where no branch learns). `steps` holds t − 1, and
            `advance` counts it.
    """

    def __init__(
        self,
        scheme: Scheme | str,
        where: Where,
        width: int,
        *,
        norm: str | None = None,
        eps: float = 1e-5,
        dropout: float = 0.0,
        warmup: int | None = None,
    ) -> None:
        super().__init__()
        if isinstance(scheme, str):
            scheme = scheme_named(scheme)
        make_norm, inner = norm_maker(scheme, norm, eps), inner_norm_maker(scheme, norm, eps)
        with scheme.asking_for_depth():
            placement = scheme.placement_at(where)
            slots = (Slot.BRANCH_IN, Slot.BRANCH_OUT, Slot.STREAM)
            norms = {slot.value: make_norm(width) if slot in placement else NoNorm() for slot in slots}
            self.norms = nn.ModuleDict(norms)
            self.entry_scale = scheme.entry_scale(where)
            self.join = scheme.join.build(Site(where, width, inner))
        self.dropout = nn.Dropout(dropout)
        self.warmup = None if warmup is None else warmup * where.block
        self.steps: Tensor | None
        self.register_buffer("steps", None if warmup is None else torch.tensor(0))

    def forward(self, state: State, branch: Update, real_BT: Tensor | None = None) -> State:
        """The next state.

        Args:
            state: the stream (B, T, D). With several streams, the state that the sublayer before returned, at
                first `scheme.join.enter(x, entry_norm)`; `scheme.join.leave(state, final_norm)` merges them.
            branch: the sublayer without its norms.
            real_BT: False at padding, for norms with statistics over tokens.
        """

        def update(x_BTD: Tensor) -> Tensor:
            entry_BTD = scaled(self.norms["branch_in"](x_BTD, real_BT), self.entry_scale)
            return self._warmed(self.norms["branch_out"](self.dropout(branch(entry_BTD)), real_BT))

        def norm(x_BTD: Tensor) -> Tensor:
            return self.norms["stream"](x_BTD, real_BT)

        return self.join(state, update, norm)

    def advance(self) -> None:
        """Count a step of training, for a residual warm-up."""
        if self.steps is not None:
            self.steps.add_(1)

    def _warmed(self, f_BTD: Tensor) -> Tensor:
        if self.steps is None or self.warmup is None:
            return f_BTD
        share = ((self.steps + 1) / self.warmup).clamp(max=1.0)
        return f_BTD * share.to(f_BTD.dtype)


def norm_maker(scheme: Scheme, norm: str | None, eps: float) -> Callable[[int], nn.Module]:
    """Maker of norms by width: of kind `norm`, else the scheme's own, else LayerNorm."""
    make = norm_named(norm or scheme.norm or "layernorm")
    return lambda width: make(width, eps)


def inner_norm_maker(scheme: Scheme, norm: str | None, eps: float) -> Callable[[int], nn.Module]:
    """Maker of norms inside branches or joins; it refuses kinds with statistics over tokens.

    A norm there does not know which tokens are padding, and an axis of heads or streams could pass as tokens.
    """
    kind = norm or scheme.norm or "layernorm"

    def make(width: int) -> nn.Module:
        if kind in OVER_TOKENS:
            raise UsageError(
                f'norm="{kind}" with scheme "{scheme.name}", which norms inside branches or joins',
                f"a norm of each token by itself, not {' or '.join(sorted(OVER_TOKENS))}",
                "choose another norm or scheme",
            )
        return norm_named(kind)(width, eps)

    return make
