"""Measurements of a trial between two steps: in eval mode, on fixed batches, leaving the trial as it was.

Dropout noise hides collapse (BERT at 3e-4, step 20: token diversity 5e-2 in train mode, 3e-11 in eval mode).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Stack
from normscope.anatomy.measuring import measuring
from normscope.forecast.hidden import Hidden, HiddenStates
from normscope.probes.parameters import Parameters
from normscope.probes.signal import centred
from normscope.probes.sums import energy, exact, gram
from normscope.probes.token_axes import batch_shape, sequences
from normscope.subjects import Batch, Subject
from normscope.subjects.feed import tensors_in

BLOCKS = 4  # blocks whose gradients are compared
SAME = 1e-5
"""Share of the differences under which all sequences are the same: round-off, or what cross-attention alone
brings into a decoder whose own input is the same in all."""


@dataclass(frozen=True)
class Evaluator:
    """A working copy of a model and the fixed batch that it is measured on.

    Attributes:
        states: reader of the last hidden states; the evaluators of copies of one model may share it.
    """

    subject: Subject
    anatomy: Anatomy
    model: nn.Module
    states: HiddenStates

    @classmethod
    def of(cls, subject: Subject, anatomy: Anatomy, model: nn.Module) -> "Evaluator":
        """An evaluator with a reader of its own."""
        return cls(subject, anatomy, model, HiddenStates(anatomy))

    @torch.no_grad()
    def state(self) -> tuple[float, dict[str, float]]:
        """Loss of the fixed batch, and token diversity of every stack's last hidden state."""
        batch = self.subject.batch
        with measuring(self.model):
            loss, found = self.states.read(self.model, batch, lambda: self.subject.loss(batch, self.model))
        diversities: dict[str, float] = {}
        for name, hidden in found.items():
            if hidden.state.ndim >= 2:
                tokens = self._sequences(hidden.state, hidden)
                if tokens.shape[1] > 1:  # a sequence of one token has no diversity
                    diversities[name] = self._diversity(name, tokens)
        return float(loss), diversities

    def _diversity(self, name: str, tokens_BTD: Tensor) -> float:
        """Token diversity of the stack `name`, in which positions count at most half, see `differences`."""
        plain, beyond = differences(tokens_BTD)
        if beyond is None:
            return plain
        limited = self.states.limited.setdefault(name, beyond > SAME * plain)
        return min(plain, 2 * beyond) if limited else plain

    def _sequences(self, stream: Tensor, hidden: Hidden) -> Tensor:
        """`stream` of the shape of `hidden` as (B, T, d)."""
        return sequences(stream, batch_shape(self.subject.batch), hidden.length)[0]

    def _split(self, pull: Tensor, hidden: Hidden) -> list[Tensor]:
        """`pull` with the last, then the first half of its sequences set to zero; none for one sequence."""
        parts = [pull.clone(), pull.clone()]
        views = [self._sequences(part, hidden) for part in parts]
        middle = views[0].shape[0] // 2
        if middle == 0 or views[0].data_ptr() != parts[0].data_ptr():
            return []
        views[0][middle:] = 0
        views[1][:middle] = 0
        return parts

    def pull(self, batches: Sequence[Batch]) -> tuple[float | None, float | None]:
        """Coherence and alignment over `batches`, see `TokenPull`.

        Each is None without a stack, without a gradient, or with a gradient that is exactly zero. Of a
        repeated batch, one half of the sequences is compared with the other; one sequence has no coherence.
        """
        if len(batches) == 1 or same(batches[0], batches[1]):
            pulls = self.pulls(batches[0], halves=True)
        else:
            pulls = [pull for batch in batches for pull in self.pulls(batch)]
        by_block = zip(*(pull.gradients for pull in pulls), strict=True)
        cosines = [cosine for gradients in by_block for cosine in pairwise_cosines(gradients)]
        return _finite_mean(cosines), _finite_mean([pull.alignment for pull in pulls])

    def pulls(self, batch: Batch, *, halves: bool = False) -> list["TokenPull"]:
        """Pull of `batch` on the tokens' differences; with `halves`, of each half of its sequences.

        Empty where the loss does not reach the weights through the hidden state.
        """
        if not self.anatomy.stacks:
            return []
        stack = self.anatomy.stacks[-1]
        weights = lower_weights(self.model, self.anatomy, stack)
        flat = [w for block in weights for w in block]
        with measuring(self.model), torch.enable_grad():
            loss, found = self.states.read(self.model, batch, lambda: self.subject.loss(batch, self.model))
            hidden = found.get(stack.name)
            if hidden is None or not hidden.state.requires_grad or not flat:
                return []
            (pull,) = torch.autograd.grad(loss, hidden.state, retain_graph=True, allow_unused=True)
            if pull is None:  # the loss runs the model itself, not on this hidden state
                return []
            states = self._sequences(hidden.state.detach(), hidden)
            parts = self._split(pull, hidden) if halves else [pull]
            result = []
            for part in parts:
                gradients = torch.autograd.grad(
                    hidden.state, flat, beyond_mean(part), retain_graph=len(parts) > 1, allow_unused=True
                )
                pairs = iter(zip(gradients, flat, strict=True))
                by_block = [
                    [torch.zeros_like(w) if g is None else g for g, w in itertools.islice(pairs, len(block))]
                    for block in weights
                ]
                result.append(TokenPull(by_block, alignment(states, self._sequences(part, hidden))))
        return result


@dataclass(frozen=True)
class TokenPull:
    """Pull of the loss on a model beyond the unigram frequencies.

    Let G = dLoss/dH at the last hidden state H, and ḡ its mean over the tokens that have a gradient. ḡ
    teaches the frequencies, whatever the tokens are; G − ḡ separates tokens.

    Attributes:
        gradients: G − ḡ pulled back to the weights of the last stack's lower half, by block and weight.
            *Coherence* is their cosine between batches, mean over blocks: near 0 where token differences
            reach the lower blocks as batch noise only.
        alignment: −⟨G, H − h̄⟩ / (‖G‖·‖H − h̄‖), the share of the pull along the current token differences.
    """

    gradients: list[list[Tensor]]
    alignment: float


def differences(states_BTD: Tensor) -> tuple[float, float | None]:
    """Shares of the energy of hidden states in which tokens differ, in all and beyond their positions.

    D = Σ‖H − h̄_b‖²/Σ‖H‖² and D′ = Σ‖H − h̄_b − h̄_t + h̄‖²/Σ‖H‖² · B/(B − 1): h̄_b is the mean token of a
    sequence, h̄_t that of a position. D′ is None for one sequence; both are 0 for H = 0.

    The diversity of a forecast is min(D, 2·D′), so that positions count at most as much as the rest. D′ is
    far below D where positions drown the input: the sines of Marian and Pegasus are 35 times as large as the
    embeddings of tokens, unless these are scaled. The limit is left out where D′ is under `SAME`·D at the
    first measurement: all sequences are then the same, and nothing tells positions from the input.

    The first sequence is subtracted before the mean over sequences, as `centred` does with tokens. One
    sequence at a time is in float64.
    """
    whole = energy = apart = 0.0
    first = total = None
    for sequence in states_BTD:
        tokens = exact(sequence)
        whole += float(tokens.square().sum())
        beside = centred(tokens)
        energy += float(beside.square().sum())
        if first is None or total is None:
            first, total = beside, torch.zeros_like(beside)
            continue
        change = beside - first
        apart += float(change.square().sum())
        total += change
    num = len(states_BTD)
    if whole == 0 or total is None:
        return 0.0, 0.0 if num > 1 else None
    if num == 1:
        return energy / whole, None
    beyond = max(0.0, apart - float(total.square().sum()) / num)
    return energy / whole, beyond * num / (num - 1) / whole


def lower_weights(model: nn.Module, anatomy: Anatomy, stack: Stack) -> list[list[nn.Parameter]]:
    """The trainable weights, by block, of up to `BLOCKS` blocks, evenly spaced in `stack`'s lower half."""
    lower = stack.blocks[: (len(stack.blocks) + 1) // 2]
    chosen = lower[:: -(-len(lower) // BLOCKS)]
    parameters = Parameters(model, anatomy)
    weights = {b.path: [p for p in parameters.of_block(b) if p.requires_grad] for b in chosen}
    return [block for block in weights.values() if block]


def alignment(states_BTD: Tensor, pull_BTD: Tensor) -> float:
    """−⟨G, H − h̄⟩ / (‖G‖·‖H − h̄‖), h̄ the mean token of each sequence; nan where one of them is zero."""
    spread = exact(states_BTD) - exact(states_BTD).mean(1, keepdim=True)
    pull = exact(pull_BTD)
    scale = float(spread.norm() * pull.norm())
    return -float((spread * pull).sum()) / scale if scale > 0 else math.nan


def _finite_mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values and all(map(math.isfinite, values)) else None


def pairwise_cosines(vectors: Sequence[Sequence[Tensor]]) -> list[float]:
    """Cosine of each two of `vectors`, each a list of tensors, in float64; nan where one of them is zero."""
    products = torch.stack([gram(tensors) for tensors in zip(*vectors, strict=True)]).sum(0)
    lengths = products.diagonal().sqrt()
    cosines = products / (lengths[:, None] * lengths)
    first, second = torch.triu_indices(len(lengths), len(lengths), offset=1)
    return [float(cosine) for cosine in cosines[first, second]]


def same(first: Batch, second: Batch) -> bool:
    """Whether two batches hold equal tensors."""
    pairs = itertools.zip_longest(tensors_in(first), tensors_in(second))
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


def beyond_mean(gradient: Tensor) -> Tensor:
    """`gradient` (…, d) less its mean over the tokens that have one; the others stay at zero."""
    has_one = (gradient != 0).any(-1, keepdim=True)
    tokens = tuple(range(gradient.ndim - 1))
    mean = gradient.sum(tokens, keepdim=True) / has_one.sum().clamp_min(1)
    return (gradient - mean) * has_one


def gradient_norms(model: nn.Module, anatomy: Anatomy) -> dict[str, float]:
    """L2 norm of `.grad` over each block's parameters, by block site; empty without any gradient."""
    if all(parameter.grad is None for parameter in model.parameters()):
        return {}  # the loss of the last step was not finite
    parameters = Parameters(model, anatomy)
    return {
        block.site: math.sqrt(sum(energy(p.grad) for p in parameters.of_block(block) if p.grad is not None))
        for block in anatomy.blocks
    }
