"""Ways to run a model: checkpointing, tracing, compiling, custom functions, fused adds."""

from typing import Any

import torch
import torch.nn.functional as F
from handwritten_base import PRE, WIDTH, Block, Tower, case, pre_tower, reading, token_ids
from handwritten_joins import joined
from handwritten_norms import with_norm
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(Tower):
    use_reentrant = False

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True


class Identity(torch.autograd.Function):
    """A custom function with its own backward, as people write to clip or reverse gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1, 1)


class NormFunction(torch.autograd.Function):
    """RMSNorm as a custom function; its forward still runs ATen ops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        unit, inner = x * scale, grad * weight
        mean = (inner * unit).mean(-1, keepdim=True)
        return scale * (inner - unit * mean), (grad * unit).flatten(0, -2).sum(0)


class FunctionNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return NormFunction.apply(x, self.weight)


class DataDependent(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        if y.abs().max() > 0:
            y = self.feed_forward(y)
        return x + y if y.isfinite().all() else x


class Fused(Block):
    """The addmm of the output projection adds the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        hidden = F.gelu(self.up(self.norm2(x)))
        return torch.addmm(x.flatten(0, 1), hidden.flatten(0, 1), self.down).view_as(x)


class Carrying(Block):
    """Returns (hidden, residual), as for fused add+norm kernels: the next block starts with the add."""

    def forward(self, pair: Any) -> Any:
        hidden, residual = pair if isinstance(pair, tuple) else (pair, None)
        residual = hidden if residual is None else residual + hidden
        residual = residual + self.attention(self.norm1(residual))
        return self.feed_forward(self.norm2(residual)), residual


class CarryingTower(Tower):
    def run(self, x: Any) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x[0] + x[1]


case("checkpoint", lambda: Checkpointed(Block(), Block()), PRE)
case("checkpoint-reentrant", lambda: CheckpointedReentrant(Block(), Block()), PRE)
case("jit-trace", lambda: torch.jit.trace(pre_tower(Block).eval(), (token_ids(),)), PRE)
case("compile-eager", lambda: torch.compile(pre_tower(Block), backend="eager"), PRE)
case("compile-aot_eager", lambda: torch.compile(pre_tower(Block), backend="aot_eager"), PRE)
case("custom-function", joined(lambda x, y: x + Identity.apply(y)), PRE)
case("custom-function-norm", lambda: with_norm(Block, FunctionNorm), reading("A.pre F.pre", norm="rmsnorm"))
case("data-dependent", lambda: pre_tower(DataDependent), PRE)
case("fused-addmm", lambda: pre_tower(Fused), PRE, unread=True)  # the branch's output is no tensor of its own
case("carried-residual", lambda: CarryingTower(Carrying(), Carrying()), PRE)
case("bfloat16", lambda: pre_tower(Block).bfloat16(), PRE)
case("float64", lambda: pre_tower(Block).double(), PRE)
case("train-mode-dropout", lambda: Tower(nn.Dropout(0.1), Block(), nn.Dropout(0.1), Block()).train(), PRE)
case("frozen", lambda: pre_tower(Block).requires_grad_(False), PRE)
