"""Looking at a trial between two steps: in eval mode, on fixed batches, leaving the trial as it was.

Dropout noise hides collapse (BERT at 3e-4, step 20: token diversity 5e-2 in train mode, 3e-11 in eval mode).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normscope import anatomy as reading
from normscope.anatomy import Anatomy, Site, Stack
from normscope.probes._layout import Hints, batch_shape, sequences
from normscope.probes._parameters import Parameters
from normscope.probes._sums import energy, inner
from normscope.probes.signal import diversity
from normscope.subjects import Batch, Subject


@dataclass(frozen=True)
class Eye:
    """What is looked at: a subject's fixed batch, through a working copy of its model."""

    subject: Subject
    anatomy: Anatomy
    model: nn.Module

    @torch.no_grad()
    def state(self) -> tuple[float, dict[str, float]]:
        """Loss of the fixed batch, and token diversity of every stack's last hidden state."""
        batch = self.subject.batch
        sites = [site for stack in self.anatomy.stacks for site in (stack.hidden, first_query(stack)) if site]
        with reading.measuring(self.model):
            loss, found = reading.capture(self.model, lambda: self.subject.loss(batch, self.model), sites)
        diversities = {
            stack.name: self._diversity(found[stack.hidden], found.get(first_query(stack)))
            for stack in self.anatomy.stacks
            if stack.hidden in found and found[stack.hidden].ndim >= 2
        }
        return float(loss), diversities

    def _diversity(self, hidden: Tensor, query: Tensor | None) -> float:
        hints = Hints(batch_shape(self.subject.batch), None if query is None else query.shape[-2])
        shares = [share for share in map(diversity, sequences(hidden, hints)[0]) if share is not None]
        return sum(shares) / len(shares) if shares else 0.0

    def coherence(self, batches: Sequence[Batch]) -> float | None:
        """Cosine between the `token_gradient`s of two batches, in the last stack's first block.

        None where there is nothing to compare: no stack, no gradient, a gradient that is exactly zero.
        """
        first, second = (self.token_gradient(batch) for batch in batches)
        product = sum((inner(a, b) for a, b in zip(first, second, strict=True)), 0.0)
        scale = math.sqrt(sum(map(energy, first)) * sum(map(energy, second)))
        return product / scale if scale > 0 and math.isfinite(scale) else None

    def token_gradient(self, batch: Batch) -> list[Tensor]:
        """Gradient of the first block's weights, from what the loss asks of each token beyond their mean.

        With G = dLoss/dH at the last hidden state and ḡ its mean over the tokens that have a gradient, this
        pulls G − ḡ back instead of G. ḡ is how the loss learns the unigram frequencies, whatever the tokens
        are; what is left is what a model needs to tell tokens apart.
        """
        if not self.anatomy.stacks:
            return []
        stack = self.anatomy.stacks[-1]
        block = Parameters(self.model, self.anatomy).of_block(stack.blocks[0])
        weights = [p for p in block if p.requires_grad]
        if not weights:
            return []
        with reading.measuring(self.model), torch.enable_grad():
            loss, found = reading.capture(
                self.model, lambda: self.subject.loss(batch, self.model), [stack.hidden]
            )
            hidden = found.get(stack.hidden)
            if hidden is None or not hidden.requires_grad:
                return []
            (pull,) = torch.autograd.grad(loss, hidden, retain_graph=True)
            gradients = torch.autograd.grad(hidden, weights, beyond_mean(pull), allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradients, strict=True)]


def first_query(stack: Stack) -> Site | None:
    """Where a sequence's length can be read: the query (…, T, d_h) of the stack's first self-attention."""
    branches = (branch for block in stack.blocks for branch in block.branches if branch.kind == "attention")
    return next((branch.attention[0].query for branch in branches if branch.attention), None)


def beyond_mean(gradient: Tensor) -> Tensor:
    """`gradient` (…, d) less its mean over the tokens that have one; the others stay at zero."""
    has_one = (gradient != 0).any(-1, keepdim=True)
    tokens = tuple(range(gradient.ndim - 1))
    mean = gradient.sum(tokens, keepdim=True) / has_one.sum().clamp_min(1)
    return (gradient - mean) * has_one


def gradient_norms(model: nn.Module, anatomy: Anatomy) -> dict[str, float]:
    """L2 norm of `.grad` over each block's parameters, by block site."""
    parameters = Parameters(model, anatomy)
    return {
        block.site: math.sqrt(sum(energy(p.grad) for p in parameters.of_block(block) if p.grad is not None))
        for block in anatomy.blocks
    }
