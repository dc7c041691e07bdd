"""Sharpness and size of the logits of every attention.

One forward, in eval mode, under the math backend. Over the keys that a query may see:

    attention/entropy          −Σ p log p / log(visible keys), mean over heads and queries that see at least
                               two keys: 1 is uniform, 0 is one-hot (entropy collapse: Zhai et al. 2023, arXiv
                               2303.06296)
    attention/logit-spread     deviation of a query's logits over √(2 log(visible keys)), mean over the same:
                               from 1 on a softmax of Gaussian logits gives its weight to a few keys
    attention/max-logit        largest |logit|
    attention/max-probability  the largest probability of a query, mean over heads and queries

A key is masked where its logit is at most -1e4 (masks are added as -inf, the dtype's lowest number, -65504 or
-1e4). Swin adds -100: where the logits are either at most -50 or between -25 and 25, the low ones are masked.
Where no logit is that low, the mask is not in the logits: then a key is masked where its probability
is exactly 0 and it lies after its query.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.anatomy import Anatomy, Branch, Site
from normscope.probes.measurement import Measurement, not_measured
from normscope.probes.rows import NOT_FINITE, Found, at, captured_without_graph, value_row
from normscope.probes.sums import exact, is_finite
from normscope.subjects import Subject

MASKED_LOGIT = -1e4  # largest logit of a masked key
SOFT_MASK, NEAR = -50.0, 25.0  # a finite mask, and the largest size of a logit beside one
PIECE = 1 << 20  # elements processed at once, in float64

ENTROPY, SPREAD = "attention/entropy", "attention/logit-spread"
ONE_KEY = "no query sees two keys"
LOGIT, PROBABILITY = "attention/max-logit", "attention/max-probability"


def measure_attention(subject: Subject, anatomy: Anatomy) -> list[Measurement]:
    """Entropy, logits' spread, largest logit and mean largest probability of every attention; one forward.

    Four rows for each attention or cross-attention branch, in the order of the forward.
    """
    branches = [branch for branch in anatomy.branches if branch.attention or "attention" in branch.kind]
    sites = [site for branch in branches for a in branch.attention for site in (a.logits, a.probabilities)]
    captured = captured_without_graph(subject, sites)
    return [row for branch in branches for row in _rows(branch, captured)]


@dataclass
class _Tally:
    """Running sums over all attentions of one branch."""

    entropy: float = 0.0
    spread: float = 0.0
    num_choosing: int = 0  # queries that see at least two keys
    probability: float = 0.0
    num_queries: int = 0  # queries that see a key at all
    logit: float = 0.0

    def add(self, logits_QS: Tensor, probabilities_QS: Tensor, visible_QS: Tensor) -> None:
        """Add queries Q over keys S."""
        p = torch.where(visible_QS, exact(probabilities_QS), 0.0)
        num_visible = visible_QS.sum(-1)
        choosing, seeing = num_visible >= 2, num_visible >= 1
        options = num_visible[choosing].double().log()
        self.entropy += float((torch.special.entr(p).sum(-1)[choosing] / options).sum())
        self.spread += float((_deviation(logits_QS, visible_QS)[choosing] / (2 * options).sqrt()).sum())
        self.num_choosing += int(choosing.sum())
        self.probability += float(p.amax(-1)[seeing].sum())
        self.num_queries += int(seeing.sum())
        largest = torch.where(visible_QS, logits_QS.detach().abs(), 0.0).max()
        self.logit = max(self.logit, float(largest))

    def rows(self, site: str) -> Iterator[Measurement]:
        """The four figures."""
        for quantity, total in ((ENTROPY, self.entropy), (SPREAD, self.spread)):
            if self.num_choosing:
                yield value_row(quantity, site, total / self.num_choosing)
            else:
                yield not_measured(quantity, site, ONE_KEY)
        if self.num_queries:
            yield value_row(LOGIT, site, self.logit)
            yield value_row(PROBABILITY, site, self.probability / self.num_queries)
        else:
            for quantity in (LOGIT, PROBABILITY):
                yield not_measured(quantity, site, "every key is masked")


def _rows(branch: Branch, captured: Mapping[Site, Tensor]) -> Iterator[Measurement]:
    tally = _Tally()
    reason = "" if branch.attention else "no softmax over keys was read in this branch"
    for attention in branch.attention:
        logits, probabilities = at(captured, attention.logits), at(captured, attention.probabilities)
        reason = _take_in(tally, logits, probabilities) or reason
    if reason:
        every = (ENTROPY, SPREAD, LOGIT, PROBABILITY)
        yield from (not_measured(quantity, branch.site, reason) for quantity in every)
    else:
        yield from tally.rows(branch.site)


def _take_in(tally: _Tally, logits: Found, probabilities: Found) -> str:
    """Add one attention to the tally; return the reason where that is not possible, else ""."""
    if isinstance(logits, str):
        return logits
    if isinstance(probabilities, str):
        return probabilities
    if logits.shape != probabilities.shape:
        return f"logits {tuple(logits.shape)} and probabilities {tuple(probabilities.shape)} differ in shape"
    if not is_finite(probabilities):
        return NOT_FINITE
    num_queries, num_keys = logits.shape[-2:]
    logits = _without_soft_mask(logits)
    mask_is_added = bool((logits <= MASKED_LOGIT).any())
    step = max(1, PIECE // (num_queries * num_keys))
    maps = (t.detach().reshape(-1, num_queries, num_keys).split(step) for t in (logits, probabilities))
    for logits_NQS, probabilities_NQS in zip(*maps, strict=True):
        seen = visible(logits_NQS, probabilities_NQS, mask_is_added)
        tally.add(logits_NQS.flatten(0, 1), probabilities_NQS.flatten(0, 1), seen.flatten(0, 1))
    return ""


def _without_soft_mask(logits: Tensor) -> Tensor:
    """The logits, with -inf for a finite mask where they show one: a gap between it and small logits."""
    low = logits <= SOFT_MASK
    if not bool(low.any()) or bool((logits <= MASKED_LOGIT).any()):
        return logits
    is_mask = bool((low | (logits.abs() <= NEAR)).all()) and not bool(low.all(-1).any())
    return logits.masked_fill(low, -torch.inf) if is_mask else logits


def _deviation(logits_QS: Tensor, visible_QS: Tensor) -> Tensor:
    """Standard deviation of each query's logits over the keys that it sees, in float64."""
    num_visible = visible_QS.sum(-1, keepdim=True).clamp(min=1)
    seen = torch.where(visible_QS, exact(logits_QS.detach()), 0.0)
    from_mean = torch.where(visible_QS, seen - seen.sum(-1, keepdim=True) / num_visible, 0.0)
    return (from_mean.square().sum(-1) / num_visible.squeeze(-1)).sqrt()


def visible(logits: Tensor, probabilities: Tensor, mask_is_added: bool) -> Tensor:
    """Keys that a query may see: bool (N, Q, S), of logits and probabilities (N, Q, S).

    Where the mask is not in the logits, a key after its query with a probability of exactly 0 is masked. A
    visible key may round to 0 too, but under a causal mask no visible key lies after its query.
    """
    if mask_is_added:
        return logits > MASKED_LOGIT
    num_queries, num_keys = logits.shape[-2:]
    behind = torch.ones(num_queries, num_keys, dtype=torch.bool, device=logits.device)
    return ~(behind.triu(num_keys - num_queries + 1) & (probabilities == 0))
