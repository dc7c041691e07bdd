"""Models and stacks at their start, and their readings: gradients, the stream's variance, slopes.

Shapes: B batch, T tokens, D width.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscope.nn import Block, Decoder, ModelConfig, Where
from normscope.nn.stack import Stack

DEPTHS = (4, 8, 16, 32)
WIDTH, VOCAB, BATCH, TOKENS = 96, 64, 4, 16
SMALL_RATE = 1e-5


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Exponent p of y ≈ c·x^p, by least squares in logarithms."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def decoder(
    scheme: str, depth: int, seed: int, *, width: int = WIDTH, heads: int = 4, **options: Any
) -> tuple[Decoder, Tensor, Tensor]:
    """A model at its start on a stream of variance 1, ids and labels (B, T), all from `seed`."""
    torch.manual_seed(seed)
    options = {"activation": "relu", "init": "xavier", "positions": "none", "vocab": VOCAB, **options}
    model = Decoder(
        ModelConfig(scheme=scheme, depth=depth, width=width, heads=heads, context=TOKENS, **options)
    )
    nn.init.normal_(model.embedding.tokens.weight)
    ids, labels = torch.randint(VOCAB, (2, BATCH, TOKENS))
    return model, ids, labels


def blocks_of(model: nn.Module) -> list[Block]:
    """The blocks of a model of one stack, in order."""
    return [module for module in model.modules() if isinstance(module, Block)]


def size_of(modules: Iterable[nn.Module]) -> int:
    """The number of parameters of modules."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def weight_of(module: nn.Module) -> Tensor:
    """The weight of a linear map."""
    assert isinstance(module, nn.Linear)
    return module.weight


def gradient_norm(module: nn.Module) -> float:
    """Norm of the gradient of a linear map's weight."""
    gradient = weight_of(module).grad
    assert gradient is not None
    return float(gradient.norm())


def down_gradients(model: Decoder, ids: Tensor, labels: Tensor) -> list[float]:
    """‖∂loss/∂W₂‖ of each block's feed-forward, the first block first."""
    model.zero_grad()
    model(ids, labels).loss.backward()
    return [gradient_norm(block.feed_forward.down) for block in blocks_of(model)]


def sgd_move(scheme: str, depth: int, seed: int, **options: Any) -> float:
    """‖Δlogits‖ by one small SGD step of the blocks' matrices, per unit of learning rate.

    Wang et al. 2022, arXiv:2203.00555, Theorem 4.2.
    """
    model, ids, labels = decoder(scheme, depth, seed, **options)
    model = model.double()
    before = model(ids, labels)
    before.loss.backward()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            if parameter.dim() == 2 and parameter.grad is not None:  # the theorem's norms have no gain
                parameter.sub_(SMALL_RATE * parameter.grad)
        return float((model(ids).logits - before.logits).norm()) / SMALL_RATE


def stack_of(scheme: str, depth: int, seed: int, *, width: int = WIDTH, **options: Any) -> Stack:
    """Blocks by themselves, for a stream that is drawn."""
    torch.manual_seed(seed)
    how = {"causal": options.pop("causal", True), "cross": options.pop("cross", False)}
    config = ModelConfig(scheme=scheme, depth=depth, width=width, heads=options.pop("heads", 4), **options)
    first = Where(1, depth, stack="decoder" if how["cross"] else "single", other_depth=depth)
    return Stack(config, first, **how)


def noise(width: int, seed: int) -> Tensor:
    """A stream (B, T, D) of N(0, 1), float32."""
    return torch.randn(BATCH, TOKENS, width, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def stream_by_block(stack: Stack, x_BTD: Tensor) -> list[Tensor]:
    """The stream (B, T, D) before the first block and after each; of several, what the end would read."""
    state, through = stack.scheme.join.enter(x_BTD, stack.entry_norm), nn.Identity()
    streams = [stack.scheme.join.leave(state, through)]
    for block in stack.blocks:
        state = block(state)
        streams.append(stack.scheme.join.leave(state, through))
    return streams


def variance(x_BTD: Tensor) -> float:
    """The variance over the features, as a mean over tokens."""
    return float(x_BTD.double().var(-1, correction=0).mean())


def streams_of(model: nn.Module, seed: int) -> list[Tensor]:
    """The stream by block of a model on random ids."""
    assert isinstance(model, Decoder)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab, (4, 16), generator=generator)
    with torch.no_grad():
        return stream_by_block(model, model.embedding(ids, torch.arange(16)[None]))
