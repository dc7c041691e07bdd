"""Ways to Jv, in the order in which they are tried.

    double backward       one VJP over the held graph of u ↦ Jᵀu; exact; about a forward and a backward
    forward mode          `torch.func.jvp`; exact; about three forwards, nothing held
    central differences   (f(x + hv) − f(x − hv)) / 2h; two forwards or more; 1e-5 to 1e-3 in float32

The first is `KeptGraph.push_rows`. All take rows (k, *x.shape) to rows (k, *y.shape).
"""

import warnings
from enum import StrEnum
from math import inf

import torch
from torch import Tensor

from normscope.linalg.differences import TOLERANCE, Map, central_difference, step
from normscope.linalg.function import math_attention
from normscope.linalg.graph import KeptGraph, Refused, TangentError, first_line

SHRINKING = (1, 1 / 16, 1 / 256)
"""Steps that are tried, of the usual one: a direction may be all in one token, where x is small."""

GOOD = 30  # error at which a step is kept, in units of ε^(2/3)

NUM_COTANGENTS = 4
SAFETY = 3
"""The mean square over 4 cotangents is under 1/9 of the error's in 2 of 100 products; the largest is kept."""


class Method(StrEnum):
    """Way in which Jv is computed."""

    DOUBLE_BACKWARD = "double backward"
    FORWARD_MODE = "forward mode"
    CENTRAL_DIFFERENCES = "central differences"


class ForwardMode:
    """`torch.func.jvp`, batched by vmap where the ops can be."""

    def __init__(self, f: Map, graph: KeptGraph) -> None:
        self._f, self._x = f, graph.inputs.detach()

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows Jv."""
        if len(rows) > 1:
            try:
                return self._refusing(torch.func.vmap(self._one, randomness="same"), rows)
            except Refused:  # no batching rule, or a branch on values; a real refusal comes below
                pass
        return torch.stack([self._refusing(self._one, row) for row in rows])

    def _one(self, v: Tensor) -> Tensor:
        with torch.enable_grad(), math_attention(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".torch.jit.script. is deprecated")  # torch's own rules
            jv: Tensor = torch.func.jvp(self._f, (self._x,), (v,))[1]
        return jv

    @staticmethod
    def _refusing(product: Map, rows: Tensor) -> Tensor:
        try:
            return product(rows).detach()
        except RuntimeError as error:
            raise Refused(f"forward mode refuses: {first_line(error)}") from error


class CentralDifferences:
    """(f(x + hv) − f(x − hv)) / 2h, with its error measured by Jᵀ at every product.

    For random u, E⟨u, d − Jv⟩² = ‖d − Jv‖², and ⟨u, Jv⟩ = ⟨Jᵀu, v⟩ costs a dot product once Jᵀu is known.
    Where that error is large, smaller steps are tried (two more forwards each), and the best is kept.
    """

    def __init__(self, f: Map, graph: KeptGraph, cotangents: Tensor) -> None:
        self._f, self._x, self._y = f, graph.inputs.detach(), graph.outputs.detach()
        self._cotangents = cotangents.double()
        shaped = cotangents.to(self._y).reshape(-1, *self._y.shape)
        self._pulled = torch.stack([graph.pull(u).reshape(-1) for u in shaped]).double()
        self._eps = graph.eps
        self._worst = self._gain = 0.0

    @property
    def round_off(self) -> float:
        """The largest error of a product so far, relative to the largest gain."""
        if not self._gain:
            return inf if self._worst else self._eps
        return max(self._eps, self._worst / self._gain)

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows Jv, one by one; two to six forwards each."""
        return torch.stack([self._one(row) for row in rows])

    def _one(self, v: Tensor) -> Tensor:
        length = float(v.double().norm())
        if length == 0:
            return torch.zeros_like(self._y)
        best, error = self._tried(v, step(self._x, v))
        for shrunk in SHRINKING[1:]:
            if error <= GOOD * self._eps ** (2 / 3) * float(best.norm()):
                break
            other, other_error = self._tried(v, shrunk * step(self._x, v))
            if not error <= other_error:  # also where it is NaN
                best, error = other, other_error
        self._worst = max(self._worst, SAFETY * error / length)
        self._gain = max(self._gain, float(best.norm()) / length)
        return best.to(self._y).reshape(self._y.shape)

    def require_agreement(self, v: Tensor) -> None:
        """Check that Jv by differences agrees with Jᵀu to 2 %, round-off aside.

        Raises:
            TangentError: Jᵀu is not the function's.
        """
        self._one(v)
        noise = self._eps ** (2 / 3) * float(self._y.double().norm()) / float(self._x.double().norm() or 1.0)
        if not self._worst <= SAFETY * (TOLERANCE * self._gain + noise):
            raise TangentError(
                f"Jᵀu contradicts finite differences: off by {self._worst / SAFETY:.2g} at gain "
                f"{self._gain:.2g}; a backward in f is not the derivative of its forward, or f has a kink "
                "at x (ReLU at 0)"
            )

    def _tried(self, v: Tensor, h: float) -> tuple[Tensor, float]:
        d = central_difference(self._f, self._x, v, h)
        gaps = self._cotangents.to(d.device) @ d - self._pulled @ v.double().reshape(-1)
        return d, float(gaps.square().mean().sqrt())


def require_adjoint(cotangents: Tensor, pulled: Tensor, v: Tensor, jv: Tensor) -> None:
    """Check ⟨u, Jv⟩ = ⟨Jᵀu, v⟩ of one u and rows of v and Jv, to 1 % and beyond round-off.

    Raises:
        TangentError: it does not hold; the message gives the worst row's gap.
    """
    eps = torch.finfo(pulled.dtype).eps
    u, w, v, jv = (t.detach().double() for t in (cotangents, pulled, v, jv))
    across = v @ w
    gaps = (jv @ u - across).abs()
    sizes = jv.norm(dim=-1) + across.abs()
    round_off = 1e3 * eps * w.norm() * v.norm(dim=-1)
    beyond = gaps - 1e-2 * sizes - round_off
    worst = int(beyond.argmax())
    if not float(beyond[worst]) <= 0:
        raise TangentError(
            f"Jv contradicts Jᵀu: ⟨u, Jv⟩ and ⟨Jᵀu, v⟩ differ by {float(gaps[worst]):.2g} at size "
            f"{float(sizes[worst]):.2g}; a backward in f is not differentiable (autograd.Function, "
            "custom op, compiled region)"
        )
