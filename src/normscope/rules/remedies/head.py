"""Remedy of the head: its bias starts at the log frequencies of the targets, which need no learning then.

Shapes: V classes or vocabulary.
"""

import itertools

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, measuring
from normscope.forecast.targets import NOT_OF_OUTPUTS, NoTargetsError, find_head, rows_of_head
from normscope.nn import set_output_bias
from normscope.nn.head import Head
from normscope.rules.remedies.remedy import NotApplicable, model_remedy, with_copy
from normscope.subjects import Subject
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
    try:
        with measuring(changed.model):
            head = find_head(changed)
            counts_V = count_targets(changed, head)
    except NoTargetsError as error:
        raise NotApplicable(error.reason) from error
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


def count_targets(subject: Subject, head: nn.Linear) -> Tensor:
    """Counts (V,) of each output of `head` as a target in the first batches."""
    counts_V = torch.zeros(head.out_features, dtype=torch.float64)
    for batch in itertools.islice(endless(subject.batches), COUNTED_BATCHES):
        targets = rows_of_head(subject, head, batch).targets
        counts_V += torch.bincount(targets.cpu(), minlength=head.out_features)
    if not counts_V.any():
        raise NoTargetsError(NOT_OF_OUTPUTS)
    return counts_V


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
