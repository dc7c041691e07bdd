"""`Residual`: the norms and the join around one branch.

Shapes: B batch, T tokens, D width.
"""

from collections.abc import Callable

from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn.joins import Site, State, Update, scaled
from normscope.nn.norms import OVER_TOKENS, NoNorm, norm_named
from normscope.nn.placement import Slot, Where
from normscope.nn.scheme import Scheme
from normscope.nn.schemes import scheme_named


class Residual(nn.Module):
    """Residual connection of one branch with the stream: `state = residual(state, branch)`.

    Works around any branch, a user's own too: `branch` maps (B, T, D) to (B, T, D).

    Args:
        scheme: the scheme to build, or its name.
        where: the sublayer's place, for numbers that depend on it.
        width: D.
        norm: a name of `NORMS`; the scheme's own, else LayerNorm, by default.
        eps: ε of the norms.
        dropout: dropout rate of the branch's output.
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

    def forward(self, state: State, branch: Update, real_BT: Tensor | None = None) -> State:
        """The next state.

        Args:
            state: the stream (B, T, D); where the scheme keeps several, what the sublayer before gave, at
                first `scheme.join.enter(x, entry_norm)`; `scheme.join.leave(state, final_norm)` makes one
                of them again.
            branch: the sublayer without its norms.
            real_BT: which tokens are not padding, for norms whose statistics run over tokens.
        """

        def update(x_BTD: Tensor) -> Tensor:
            entry_BTD = scaled(self.norms["branch_in"](x_BTD, real_BT), self.entry_scale)
            return self.norms["branch_out"](self.dropout(branch(entry_BTD)), real_BT)

        def norm(x_BTD: Tensor) -> Tensor:
            return self.norms["stream"](x_BTD, real_BT)

        return self.join(state, update, norm)


def norm_maker(scheme: Scheme, norm: str | None, eps: float) -> Callable[[int], nn.Module]:
    """Maker of norms of a width: the kind asked for, else the scheme's own, else LayerNorm."""
    make = norm_named(norm or scheme.norm or "layernorm")
    return lambda width: make(width, eps)


def inner_norm_maker(scheme: Scheme, norm: str | None, eps: float) -> Callable[[int], nn.Module]:
    """The same for the inside of a branch or a join; it refuses kinds whose statistics run over tokens.

    A norm in there is not told which tokens are padding, and may take heads or streams for tokens.
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
