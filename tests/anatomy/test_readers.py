"""Readers of the stream that a stack without a final norm hands on: a norm, nothing, or weights."""

import pytest
import torch
from torch import Tensor, nn

from normscope.anatomy import read_anatomy

WIDTH = 16


class PreNorm(nn.Module):
    """Three Pre-LN feed-forward blocks and an end; no norm directly after the last block."""

    def __init__(self, end: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            for _ in range(3)
        )
        self.end = end

    def forward(self, x_BTC: Tensor) -> Tensor:
        for layer in self.layers:
            x_BTC = x_BTC + layer(x_BTC)
        return self.end(x_BTC)


class Around(nn.Module):
    """A norm, and a path around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y + self.norm(y)


class Neck(nn.Module):
    """The neck of a vision backbone: a convolution over the tokens and a norm, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip((self.first, self.second), self.norms, strict=True):
            x = norm(conv(x.mT).mT)
        return x


class Mean(nn.Module):
    """Mean over the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


ENDS = {
    "norm": (nn.LayerNorm(WIDTH), "norm"),
    "norm behind a map": (nn.Sequential(linear(), nn.LayerNorm(WIDTH)), "norm"),
    "norm behind maps and ReLU": (nn.Sequential(linear(), nn.ReLU(), linear(), nn.RMSNorm(WIDTH)), "norm"),
    "neck": (Neck(), "norm"),
    "head": (linear(), "weights"),
    "head after a mean": (nn.Sequential(Mean(), linear()), "weights"),
    "GELU before the norm": (nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(WIDTH)), "weights"),
    "path around the norm": (Around(), "weights"),
    "nothing": (nn.Identity(), "nothing"),
    "mean": (Mean(), "nothing"),
    "tanh": (nn.Tanh(), "nothing"),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_reader_of_a_stream(name: str) -> None:
    end, reader = ENDS[name]
    (stack,) = read_anatomy(PreNorm(end), torch.randn(2, 5, WIDTH)).stacks
    assert len(stack.blocks) == 3
    assert (stack.final_norm is not None) == (name == "norm")
    assert stack.read_by == reader


@pytest.mark.parametrize("name", [name for name, (_, reader) in ENDS.items() if reader == "norm"])
def test_a_norm_hides_the_size_of_the_stream(name: str) -> None:
    """The law behind the reading: a larger stream leaves the output as it is, with biases at zero."""
    end = ENDS[name][0]
    for parameter_name, parameter in end.named_parameters():
        if parameter_name.endswith("bias"):
            nn.init.zeros_(parameter)
    x = torch.randn(2, 5, WIDTH)
    torch.testing.assert_close(end(1e3 * x), end(1e6 * x), rtol=1e-4, atol=1e-4)
