"""`swap`: replace the scheme of a model, and measure the change of its output.

Shapes: B batch, T tokens, V vocabulary or classes.
"""

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from normscope.nn.drawn import DRAWN, is_trained, remember
from normscope.nn.encoder_decoder import EncoderDecoder
from normscope.nn.generate import resting
from normscope.nn.linear import SigmaLinear
from normscope.nn.models import MODELS, Model, bare, name_of
from normscope.nn.tensors import put, tensors_of
from normscope.nn.vision import Vision

_SEQUENCES, _TOKENS = 4, 32


class SwapWarning(UserWarning):
    """Warning that the weights were trained with another scheme, so that the model's output has changed.

    Attributes:
        relative_change: ‖new logits − old‖ / ‖old‖.
        kl: KL(old ‖ new) of the predictions, in nats per token (or image).
        dropped, new: paths of the old model's tensors that were dropped, and of the new model's tensors that
            were drawn; block numbers are written as `*`.
    """

    def __init__(
        self, words: str, relative_change: float, kl: float, dropped: list[str], new: list[str]
    ) -> None:
        self.relative_change, self.kl, self.dropped, self.new = relative_change, kl, dropped, new
        super().__init__(
            f"{words}: the weights were trained; the logits change by {relative_change:.0%}, "
            f"KL(old ‖ new) is {kl:.2g} nats per prediction. Train it further, or from new weights. "
            f"Dropped: {_listed(dropped)}. New: {_listed(new)}."
        )


def swap(model: Model, scheme: str, ids: Tensor | None = None) -> Model:
    """Build a model of the same config with another scheme; weights whose path and shape fit are kept.

    The other weights are drawn, as in `build`. `model` and the global generators are not changed.

    A swap changes what trained weights compute. A Post-LN decoder of 6 blocks with a loss of 2.63 nats per
    byte after 100 steps has 3.56 as Pre-LN, above the unigram entropy of 3.16; 100 more steps bring it to
    2.44 (docs/swap.md has the script). Trained weights therefore cause a warning with the size of the change.

    Args:
        model: one of `MODELS`.
        scheme: a name of `SCHEMES`.
        ids: (B, T), input for measuring the change; for `Vision`, images (B, C, H, W). The default is random,
            but always the same.

    Warns:
        SwapWarning: the weights were trained (they differ from their initial values) and the output changes.

    Raises:
        UsageError: the scheme is unknown, or the model is not one of `MODELS`.
    """
    model = bare(model)
    other = _built(model, scheme)
    old, own = tensors_of(model), tensors_of(other)
    kept = {path for path in own if path in old and path != DRAWN and old[path].shape == own[path].shape}
    first = next(iter(old.values()))
    put(
        other,
        {path: _clone(old[path]) if path in kept else _alike(own[path], first) for path in own},
    )
    for path, module in other.named_modules():
        if isinstance(module, SigmaLinear) and f"{path}.u" not in kept:
            module.settle()
    other.settle()
    other.train(model.training)
    if not is_trained(model):
        remember(other)
        return other
    relative_change, kl = _change(model, other, _example(model) if ids is None else ids)
    if relative_change != 0:
        dropped, new = (_folded(set(paths) - kept - {DRAWN}) for paths in (old, own))
        words = f"{model.config.scheme} → {scheme}"
        warnings.warn(SwapWarning(words, relative_change, kl, dropped, new), stacklevel=2)
    return other


def _built(model: Model, scheme: str) -> Model:
    """Build the model with `scheme` on the CPU, from fake tensors if `model` is; keep global generators."""
    kind = MODELS[name_of(model)]
    config = dataclasses.replace(model.config, scheme=scheme)
    mode = next((p.fake_mode for p in model.parameters() if isinstance(p, FakeTensor)), None)
    with mode or contextlib.nullcontext(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return kind(config)


def _clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _alike(tensor: Tensor, first: Tensor) -> Tensor:
    """`tensor` on the old model's device and in its dtype."""
    dtype = first.dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(first.device, dtype).requires_grad_(tensor.requires_grad)


def _example(model: Model) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    config = model.config
    if isinstance(model, Vision):
        shape = (_SEQUENCES, config.channels, config.image, config.image)
        return torch.randn(shape, generator=generator)
    return torch.randint(config.vocab, (_SEQUENCES, min(_TOKENS, config.context)), generator=generator)


@torch.no_grad()
def _change(old: Model, new: Model, ids: Tensor) -> tuple[float, float]:
    """‖new − old‖/‖old‖ of the logits, and the mean of KL(old ‖ new) over their rows."""
    before, after = (_logits(model, ids).double() for model in (old, new))
    relative = torch.linalg.vector_norm(after - before) / torch.linalg.vector_norm(before)
    logs, new_logs = before.log_softmax(-1), after.log_softmax(-1)
    return float(relative), float((logs.exp() * (logs - new_logs)).sum(-1).mean())


def _logits(model: Model, ids: Tensor) -> Tensor:
    weight = next(model.parameters())
    ids = ids.to(weight.device, weight.dtype if ids.is_floating_point() else None)
    with resting(model):
        if isinstance(model, EncoderDecoder):
            return model(ids, decoder_ids=ids).logits
        return model(ids).logits


def _folded(paths: Iterable[str]) -> list[str]:
    return sorted({re.sub(r"\.\d+\.", ".*.", path) for path in paths})


def _listed(paths: Iterable[str]) -> str:
    return ", ".join(paths) or "nothing"
