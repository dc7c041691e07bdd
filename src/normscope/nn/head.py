"""Head that maps the stream to logits, and its bias at the log frequencies of a text.

Shapes: B batch, T tokens, D width, V vocabulary or classes.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn.config import ModelConfig
from normscope.nn.joins import scaled
from normscope.nn.linear import Gain
from normscope.nn.schemes import scheme_named

SMOOTHING = 1.0
"""Added to each count, so that ids that do not occur keep a probability."""


class Head(nn.Linear):
    """W x (+ b), with the soft cap `config.output_softcap`.

    μP divides W x by width/base_width (Yang et al. 2022, arXiv:2203.03466); nGPT has a learnt scale s_z for
    each logit, from 1 (Loshchilov et al. 2024, arXiv:2410.01131).

    Args:
        config: width, bias and soft cap.
        num_outputs: V.
        tied: embedding that shares W; None for a separate W.
    """

    def __init__(self, config: ModelConfig, num_outputs: int, tied: nn.Embedding | None = None) -> None:
        super().__init__(config.width, num_outputs, bias=config.output_bias is not False)
        self.softcap = config.output_softcap
        self.scale = 1 / config.width_multiplier
        on_sphere = scheme_named(config.scheme).on_sphere
        self.gain = Gain((num_outputs,), start=1.0, held=config.width**-0.5) if on_sphere else None
        if tied is not None:
            self.weight = tied.weight

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) → (…, V)."""
        logits = super().forward(scaled(x, self.scale))
        if self.gain is not None:
            logits = self.gain() * logits
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(logits / self.softcap)


@torch.no_grad()
def set_output_bias(model: nn.Module, counts: Tensor | Sequence[float]) -> None:
    """Set the bias of the head to log((counts + 1)/Σ(counts + 1)); add a bias if there is none.

    The initial loss is then the text's unigram entropy, which saves the steps in which a model learns these
    frequencies (Karpathy 2019, "A recipe for training neural networks"). Under a soft cap c the bias is
    c·artanh(log f/c), so that the capped logits are log f.

    Args:
        model: a normscope model with a head.
        counts: (V,), number of occurrences of each id.

    Raises:
        UsageError: the model has no head, the counts have another shape or are negative, or the soft cap is
            below the spread of the log frequencies.
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
        # From now on the bias is a weight: a model loaded from its files needs no counts.
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
