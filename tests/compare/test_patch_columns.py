"""Patches of an image: however they are cut, the map has its columns in the order of a kernel."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normscope

CHANNELS, SIDE, PATCH, WIDTH = 3, 8, 4, 16
ROWS = SIDE // PATCH


def _by_convolution(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight.view(WIDTH, CHANNELS, PATCH, PATCH), stride=PATCH).flatten(2).mT


def _by_columns(x: Tensor, weight: Tensor) -> Tensor:
    return F.unfold(x, PATCH, stride=PATCH).mT @ weight.T


def _by_windows(x: Tensor, weight: Tensor) -> Tensor:
    windows = x.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # b c h w p1 p2
    return F.linear(windows.permute(0, 2, 3, 4, 5, 1).reshape(len(x), ROWS * ROWS, -1), weight)


def _by_views(x: Tensor, weight: Tensor) -> Tensor:
    parts = x.view(-1, CHANNELS, ROWS, PATCH, ROWS, PATCH)  # as einops writes it
    return parts.permute(0, 2, 4, 3, 5, 1).reshape(len(x), ROWS * ROWS, -1) @ weight.T


def _channels_first(x: Tensor, weight: Tensor) -> Tensor:
    parts = x.reshape(-1, CHANNELS, ROWS, PATCH, ROWS, PATCH).permute(0, 2, 4, 1, 3, 5)
    return F.linear(parts.flatten(3).flatten(1, 2), weight)


def _columns_first(x: Tensor, weight: Tensor) -> Tensor:
    parts = x.reshape(-1, CHANNELS, ROWS, PATCH, ROWS, PATCH).permute(0, 2, 4, 5, 1, 3)
    return F.linear(parts.flatten(3).flatten(1, 2), weight)


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "unfold": _by_columns,
    "windows": _by_windows,
    "views": _by_views,
    "channels first": _channels_first,
    "columns first": _columns_first,
}


class Vision(nn.Module):
    """Two Pre-LN layers on the patches, the mean of the tokens, and a head."""

    def __init__(self, way: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.way = way
        self.kernel = nn.Parameter(0.2 * torch.randn(WIDTH, CHANNELS * PATCH * PATCH))
        self.places = nn.Parameter(0.02 * torch.randn(1, ROWS * ROWS, WIDTH))
        self.kind = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.way(images, self.kernel) + self.kind
        x = x + self.places[:, : x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


@pytest.mark.parametrize("way", WAYS)
def test_patches_that_are_cut_in_another_way_are_the_same_function(way: str) -> None:
    torch.manual_seed(0)
    a, b = Vision(_by_convolution), Vision(WAYS[way])
    images = torch.randn(2, CHANNELS, SIDE, SIDE)
    found = normscope.diff(a, b, batch=images, reraise=True)
    assert found.differences == ()
    assert not any("guessed" in note for note in found.notes)
