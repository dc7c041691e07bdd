"""Label smoothing: its share, from the gradient of a cross-entropy, and the entropy of smoothed targets.

With a smoothing of ε, the target of a row is (1 − ε)·(its id) + ε/V for each of the V ids. The least loss of
a model that ignores its input is then the entropy of (1 − ε)·p + ε/V, p the frequencies of the ids.

Szegedy et al. 2016, arXiv:1512.00567, section 7.
"""

import numpy as np
import torch
from torch import Tensor

LEAST, MOST = 0.01, 0.5
"""Shares between which it is smoothing. The rounding of bfloat16 shows as less; a regression's as 1."""
SCATTER = 0.01
"""Largest standard deviation of the share between rows; a loss with weights of its own has more."""
SUM = 0.05
"""Largest sum of a row's gradient as a share of its size; that of a softmax is 0 but for rounding."""
SPREAD, PRECISE = 1e-3, 40.0
"""Least standard deviation of the probabilities, as a share of their mean, that shows the smoothing without
the loss, and the least as a multiple of the gradient's eps (0.3 in bfloat16).

Probabilities that are more even are as even as a smoothed target, and rounding hides the rest.
"""
SAME = 1e-9
"""Largest 1 − cos² between the two parts of the gradient at which they are one, as of two ids, one of them
the only target."""
MISFIT = 0.05
"""Largest part of the gradient that a smoothed target does not explain; a loss with weights has more."""


def smoothing_of(logits: Tensor, gradient: Tensor, targets: Tensor, loss: float) -> float:
    """Share ε of label smoothing in a cross-entropy; 0 without.

    With a factor r, the loss of N rows is r·((1 − ε)·C + ε·U), C its mean for the targets and U for all ids,
    and its gradient at the target of a row is −r·(1 − ε + ε/V − softmax)/N. These two give r and ε.

    Args:
        logits: (N, V).
        gradient: of the loss by these, (N, V).
        targets: ids (N,).
        loss: its value.
    """
    num, width = logits.shape
    if width == 1:  # one id has a loss of 0
        return 0.0
    log = logits.log_softmax(1)
    at_target = log.gather(1, targets[:, None])
    ours, all_ids = -float(at_target.mean()), -float(log.mean())
    pulls, misses = -num * gradient.gather(1, targets[:, None]), 1 - at_target.exp()
    pull, missed = float(pulls.mean()), float(misses.mean())
    share = (loss * missed - pull * ours) / (loss * (1 - 1 / width) + pull * (all_ids - ours))
    factor = loss / ((1 - share) * ours + share * all_ids)
    is_even = float((misses - pulls / factor).std(correction=0)) <= SCATTER
    is_of_softmax = bool((gradient.sum(1).abs() <= SUM * gradient.abs().sum(1)).all())
    return share if is_even and is_of_softmax and LEAST < share < MOST else 0.0


def smoothing_without_loss(logits: Tensor, gradient: Tensor) -> float | None:
    """Share ε of label smoothing in a cross-entropy of which only the gradient is known, up to a factor.

    A row of the gradient is w·(softmax − target) + w·ε·(target − 1/V). Least squares over all rows give w and
    w·ε. The factor may be that of a loss scale, or of an accumulation.

    Args:
        logits: (N, V).
        gradient: of the loss by these times any factor, (N, V); the lowest entry of a row is its target.

    Returns:
        the share, 0 without smoothing, or None if the logits differ too little to tell.
    """
    gradient = gradient.cpu()  # MPS has no float64
    chance = logits.cpu().double().softmax(1)
    width = chance.shape[1]
    spread = float((width * chance - 1).square().mean().sqrt())
    if spread < max(SPREAD, PRECISE * torch.finfo(gradient.dtype).eps):
        return None
    target = torch.zeros_like(chance).scatter_(1, gradient.argmin(1, keepdim=True), 1.0)
    parts = torch.stack([(chance - target).flatten(), (target - 1 / width).flatten()], 1)
    pulled = gradient.double().flatten()
    squares = parts.mT @ parts
    if float(squares.det()) <= SAME * float(squares.diag().prod()):
        return None
    weight, smoothed = torch.linalg.solve(squares, parts.mT @ pulled).tolist()
    missed = pulled - weight * parts[:, 0] - smoothed * parts[:, 1]
    if float(missed.norm()) > MISFIT * float(pulled.norm()):
        return 0.0
    share = smoothed / weight
    return share if LEAST < share < MOST else 0.0


def smoothed_entropy(counts: np.ndarray, entropy: float, smoothing: float) -> float:
    """Entropy in nats of the smoothed targets of a text.

    It is that of the smoothed frequencies of the sample; and what the sample's own frequencies lack to the
    entropy of the text, they lack too, but for the share that is smoothed.

    Args:
        counts: of each of the V ids in a sample of the text (V,).
        entropy: of the text without smoothing, in nats.
        smoothing: share ε.
    """
    width, shares = len(counts), counts / counts.sum()
    smooth = (1 - smoothing) * shares + smoothing / width
    lacking = entropy - _entropy(shares)
    return min(_entropy(smooth) + (1 - smoothing) * lacking, float(np.log(width)))


def _entropy(shares: np.ndarray) -> float:
    known = shares[shares > 0]
    return float(-(known * np.log(known)).sum())
