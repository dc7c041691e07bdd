"""`Vision`: a Transformer that classifies images cut into patches.

Shapes: B batch, C channels, H × W pixels, P side of a patch, T patches, D width, V classes.
"""

import dataclasses

import torch
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn.config import ModelConfig
from normscope.nn.context import Context
from normscope.nn.embedding import Positioned
from normscope.nn.head import Head
from normscope.nn.output import Output
from normscope.nn.placement import Where
from normscope.nn.sphere import WholeModel
from normscope.nn.stack import Stack


class Vision(Stack, WholeModel):
    """Vision Transformer (Dosovitskiy et al. 2021, arXiv:2010.11929) that pools by the mean.

    Raises:
        UsageError: the patches do not divide the image.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, Where(1, config.depth, base_depth=config.base_depth), causal=False)
        self.config = dataclasses.replace(config, depth=config.num_blocks)
        self.image_size = config.image
        self.patches = Patches(config)
        self.head = Head(config, config.classes)
        self._finish(config, self.first)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Output:
        """Logits (B, V) for images (B, C, H, W), and with labels (B,) the loss.

        Raises:
            UsageError: images or labels have another shape.
        """
        x_BTD = self.patches(images)
        position_1T = torch.arange(x_BTD.shape[1], device=x_BTD.device)[None]
        context = Context(rotation=self.patches.rotation(position_1T, x_BTD.dtype))
        x_BTD = self.run(self.patches.place(x_BTD, position_1T), context)
        return self._output(self.head(x_BTD.mean(dim=1)), labels)


class Patches(Positioned):
    """Images (B, C, H, W) cut into P × P patches, each through one linear map: (B, T, D), row by row."""

    def __init__(self, config: ModelConfig) -> None:
        if config.image % config.patch:
            raise UsageError(
                f"patch={config.patch} for image={config.image}",
                "patches that divide the image",
                "change one of the two",
            )
        super().__init__(config, (config.image // config.patch) ** 2)
        self.project = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) → (B, T, D), without positions."""
        side = self.config.image
        expected = (self.config.channels, side, side)
        if images.dim() != 4 or tuple(images.shape[1:]) != expected:
            raise UsageError(
                f"images of shape {tuple(images.shape)}",
                f"(B, {', '.join(map(str, expected))})",
                "resize them, or set image and channels",
            )
        return self.project(images).flatten(2).mT
