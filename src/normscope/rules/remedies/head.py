"""Remedy of the head: its bias starts at the log frequencies of the targets, which need no learning then.

Shapes: N rows of logits, V classes or vocabulary.
"""

import contextlib
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, measuring
from normscope.nn import set_output_bias
from normscope.nn.head import Head
from normscope.rules.remedies.remedy import NotApplicable, model_remedy, with_copy
from normscope.subjects import Batch, Subject, untouched
from normscope.train import endless

COUNTED_BATCHES = 16
"""Batches whose targets are counted; each costs a forward."""
SMOOTHED = 0.05
"""Largest share of the counts for ids that were not seen."""
CLOSE = 0.02
"""Largest difference from the log frequencies at which a bias counts as set, standard deviation in nats."""


@model_remedy(
    "output-bias",
    summary="The output layer's bias starts at the log frequencies of the targets.",
    code="head.bias.data = torch.log((counts + 1) / (counts + 1).sum())  # how often each id occurs",
    cost="nothing per step; one pass over a part of the text, once",
    source='Karpathy 2019, "A recipe for training neural networks"; it rescues 6 to 8 Post-LN blocks',
    reach=1,
)
def output_bias(subject: Subject, anatomy: Anatomy) -> Subject:
    if subject.loss_fn is None:
        raise NotApplicable("no loss is known, so no targets")
    changed = with_copy(subject)
    with measuring(changed.model):
        head = find_head(changed)
        counts_V = count_targets(changed, head)
    log_V = log_frequencies(counts_V)
    if head.bias is not None and _is_set(head.bias.detach(), log_V, counts_V):
        raise NotApplicable("the output layer's bias is at the log frequencies already")
    _set_bias(changed.model, head, log_V)
    return changed


def log_frequencies(counts_V: Tensor) -> Tensor:
    """log of the smoothed shares of counts (V,)."""
    total, classes = float(counts_V.sum()), counts_V.numel()
    smoothing = min(1.0, SMOOTHED * total / classes)
    return ((counts_V.double() + smoothing) / (total + smoothing * classes)).log()


def find_head(subject: Subject) -> nn.Linear:
    """The linear map that makes the logits: the last one that runs before the loss.

    Raises:
        NotApplicable: there is none, or it is used several times.
    """
    called: list[nn.Linear] = []
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for module in subject.model.modules():
            if isinstance(module, nn.Linear):
                hooks.enter_context(module.register_forward_hook(lambda head, *_: called.append(head)))
        subject.loss()
    if not called:
        raise NotApplicable("no nn.Linear makes the logits")
    if sum(module is called[-1] for module in called) > 1:
        raise NotApplicable("the last linear map is used more than once")
    return called[-1]


def count_targets(subject: Subject, head: nn.Linear) -> Tensor:
    """Counts (V,) of each output of `head` as a target in the first batches.

    The gradient of a cross-entropy in a row of logits is w·(softmax − target). Its one negative entry is the
    target, wherever the labels are stored and however they are shifted or masked.
    """
    counts_V = torch.zeros(head.out_features, dtype=torch.float64)
    for batch in itertools.islice(endless(subject.batches), COUNTED_BATCHES):
        gradient_NV = _gradient_of_logits(subject, head, batch)
        gradient_NV = gradient_NV[gradient_NV.any(1)]
        if bool(((gradient_NV < 0).sum(1) != 1).any()):
            raise NotApplicable("the loss is not a cross-entropy of the last linear map's outputs")
        counts_V += torch.bincount(gradient_NV.argmin(1).cpu(), minlength=head.out_features)
    if not counts_V.any():
        raise NotApplicable("the loss does not depend on the last linear map's outputs")
    return counts_V


def _gradient_of_logits(subject: Subject, head: nn.Linear, batch: Batch) -> Tensor:
    """∂loss/∂logits (N, V) with the logits as a leaf: nothing below them is differentiated."""
    leaves: list[Tensor] = []

    def cut(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().float().requires_grad_())
        return leaves[-1].to(output.dtype)

    with untouched(subject.model) as model, head.register_forward_hook(cut), torch.enable_grad():
        model.requires_grad_(False)
        loss = subject.loss(batch)
        if not loss.requires_grad:
            raise NotApplicable("the loss does not depend on the last linear map's outputs")
        (gradient,) = torch.autograd.grad(loss, leaves)
    return gradient.reshape(-1, head.out_features)


def _is_set(bias_V: Tensor, log_V: Tensor, counts_V: Tensor) -> bool:
    """True where a bias already gives the targets' frequencies: its excess loss is small."""
    shares_V = counts_V / counts_V.sum()
    loss = -(shares_V * bias_V.double().cpu().log_softmax(0)).sum()
    return float(loss + (shares_V * log_V).sum()) < CLOSE


@torch.no_grad()
def _set_bias(model: nn.Module, head: nn.Linear, log_V: Tensor) -> None:
    if isinstance(head, Head):  # ours knows soft caps and scales
        set_output_bias(model, log_V.exp() * 1e9)
    elif head.bias is None:
        head.bias = nn.Parameter(log_V.to(head.weight))
    else:
        head.bias.copy_(log_V)
