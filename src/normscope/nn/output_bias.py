"""The head's bias at the log frequencies of a text: the first loss is the text's unigram entropy.

Shapes: V vocabulary.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn.config import ModelConfig
from normscope.nn.head import Head

SMOOTHING = 1.0
"""Added to each count, so that an id which the text lacks keeps a probability."""


@torch.no_grad()
def set_output_bias(model: nn.Module, counts: Tensor | Sequence[float]) -> None:
    """Set the bias of the head to log((counts + 1)/Σ(counts + 1)); makes the bias where there is none.

    A model learns these frequencies first; this saves it those steps (Karpathy 2019, "A recipe for training
    neural networks"). Under a soft cap c the bias is c·artanh(log f/c), which comes out as log f.

    Args:
        model: of ours, with a head.
        counts: (V,), how often each id occurs.

    Raises:
        UsageError: no head, counts of another shape or negative, a soft cap below the spread of the logs.
    """
    head = next((module for module in model.modules() if isinstance(module, Head)), None)
    if head is None:
        raise UsageError(f"a {type(model).__name__} without a head", "a model of normscope.nn", "build one")
    bias_V = _log_frequencies(counts, head.out_features)
    if head.softcap is not None:
        bias_V = _uncapped(bias_V, head.softcap)
    bias_V = bias_V.to(head.weight)
    if head.bias is None:
        head.bias = nn.Parameter(bias_V)
    else:
        head.bias.copy_(bias_V)
    config = getattr(model, "config", None)
    if isinstance(config, ModelConfig):
        # The bias is a weight from here on: a model loaded from its files needs no counts.
        model.config = dataclasses.replace(config, output_bias=True)  # type: ignore[assignment]


def _log_frequencies(counts: Tensor | Sequence[float], num_outputs: int) -> Tensor:
    counts_V = torch.as_tensor(counts, dtype=torch.float64, device="cpu")
    if counts_V.shape != (num_outputs,) or not bool((counts_V >= 0).all()):
        raise UsageError(
            f"counts of shape {tuple(counts_V.shape)}",
            f"{num_outputs} numbers from 0, one for each output",
            "count each id, for example by torch.bincount(ids, minlength=vocab)",
        )
    smoothed_V = counts_V + SMOOTHING
    return (smoothed_V / smoothed_V.sum()).log()


def _uncapped(log_V: Tensor, softcap: float) -> Tensor:
    """Logits that the soft cap maps to log_V, up to a constant that softmax ignores."""
    centred_V = log_V - (log_V.max() + log_V.min()) / 2
    if float(centred_V.abs().max()) >= softcap:
        raise UsageError(
            f"output_softcap={softcap:g}",
            f"over {float(centred_V.abs().max()):.3g}, half the spread of these log frequencies",
            "raise or drop the soft cap",
        )
    return softcap * torch.atanh(centred_V / softcap)
