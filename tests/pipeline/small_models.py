"""Small models of every placement, for tests of the whole pipeline. Each trains in milliseconds."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normscope.demo.examples import CausalEncoder


class Sublayers(nn.Module):
    """A stack of feed-forward residual blocks whose join is a function of (x, branch, norm)."""

    def __init__(
        self, join: Callable[[Tensor, nn.Module, nn.Module], Tensor], norm: type[nn.Module] = nn.LayerNorm
    ):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(ResidualBlock(join, norm) for _ in range(3))
        self.final = norm(16)
        self.head = nn.Linear(16, 256)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(ids_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(self.final(x_BTC))


class ResidualBlock(nn.Module):
    def __init__(self, join: Callable[[Tensor, nn.Module, nn.Module], Tensor], norm: type[nn.Module]):
        super().__init__()
        self.join = join
        self.norm = norm(16)
        self.branch = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, self.branch, self.norm)


def pre(x: Tensor, branch: nn.Module, norm: nn.Module) -> Tensor:
    return x + branch(norm(x))


def post(x: Tensor, branch: nn.Module, norm: nn.Module) -> Tensor:
    return norm(x + branch(x))


def res_post(x: Tensor, branch: nn.Module, norm: nn.Module) -> Tensor:
    return x + norm(branch(x))


def peri(x: Tensor, branch: nn.Module, norm: nn.Module) -> Tensor:
    return x + norm(branch(norm(x)))


class WithBuffers(nn.Module):
    """A model whose forward writes to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Sublayers(pre)
        self.running = nn.BatchNorm1d(256)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids_BT: Tensor) -> Tensor:
        self.calls += 1
        return self.running(self.inner(ids_BT).transpose(1, 2)).transpose(1, 2)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=256, n_positions=64))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "post-encoder": lambda: CausalEncoder(depth=2, width=32),
    "pre-encoder": lambda: CausalEncoder(depth=2, width=32, norm_first=True, final_norm=True),
    "pre": lambda: Sublayers(pre),
    "post": lambda: Sublayers(post),
    "res-post": lambda: Sublayers(res_post),
    "peri": lambda: Sublayers(peri),
    "rms-pre": lambda: Sublayers(pre, nn.RMSNorm),
    "buffers": WithBuffers,
    "gpt2": gpt2,
}
