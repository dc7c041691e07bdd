"""Figures that are measured every few steps only, because they cost more than the norms of every step.

    stream/max        largest |x| of a stream
    stream/diversity  ‖H − h̄‖²/‖H‖², h̄ the mean token of its sequence, over `SEQUENCES` sequences; in eval
                      mode where the run's forwards draw random numbers, see `noise.py`
    precision/float16-headroom  log2(65504/max |x|) of the streams and of the terms that branches add, where
                      these are float16; only under float16
    branch/update-ratio  RMS of the term that a branch adds over the RMS of the stream that it is added to
    weight/norm       ‖w‖₂ of the parameters, by kind
    gain/rms          RMS of each norm's gain
    update/ratio      RMS of the update over the RMS of the weights, by kind
    update/lost       share of the entries that a step leaves as they were, by kind, without embeddings
    adam/lag          RMS of the gradient over the root of Adam's mean square, by kind: above 1 the mean lags
    adam/rate         learning rate over the root of the same plus ε, by kind: its factor on a gradient

Updates are measured on `SAMPLE` entries of each parameter.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from normscope.monitor.alarms import NOT_MEASURED, is_measured
from normscope.monitor.alarms.precision import LARGEST
from normscope.monitor.groups import EMBEDDING, NORM
from normscope.monitor.plan import Plan
from normscope.monitor.reductions import local, norms, sampled
from normscope.monitor.row import Layout
from normscope.monitor.taken import rate_of
from normscope.probes.token_axes import sequences

Floats = NDArray[np.float64]
QUANTITIES_BY_KIND = ("update/ratio", "update/lost", "adam/lag", "adam/rate")
SEQUENCES = 2
"""Sequences of a batch that the diversity of tokens is measured on."""
_NO_DIVERSITY = -1.0
"""Stands for `NOT_MEASURED` on the device: torch does not keep the bits of a NaN."""


class Sites:
    """Measurements of one step, between its forward and the end of its update.

    Attributes:
        layout: (quantity, site) of each value.
    """

    def __init__(self, plan: Plan, optimizers: Sequence[Optimizer], *, with_headroom: bool = False) -> None:
        self._plan, self._optimizers = plan, optimizers
        self._ranged = plan.columns if with_headroom else ()
        self._streams = [column for _, column in plan.of("stream")]
        branches = [(each.site, column) for each, column in plan.of("branch") if each.site in plan.beside]
        self._branches = [(column, plan.beside[site]) for site, column in branches]
        groups = plan.groups
        self._gains = [i for i, p in enumerate(groups.parameters) if groups.kind(i) == NORM and p.ndim == 1]
        self._gains = [i for i in self._gains if not groups.names[i].endswith("bias")]
        self._num_of_forward = 2 * len(self._streams) + len(self._branches) + len(self._ranged)
        self._forward: list[Floats] = []
        self._old: Tensor | None = None
        self._lengths: NDArray[np.int64] | None = None  # entries of each parameter in the sample
        streams = [each.site for each, _ in plan.of("stream")]
        self.layout: Layout = (
            *(("stream/max", site) for site in streams),
            *(("stream/diversity", site) for site in streams),
            *(("branch/update-ratio", site) for site, _ in branches),
            *(("precision/float16-headroom", each.site) for each in plan.streams[: len(self._ranged)]),
            *(("weight/norm", kind) for kind in groups.kinds),
            *(("gain/rms", groups.names[i]) for i in self._gains),
            *((name, kind) for name in QUANTITIES_BY_KIND for kind in groups.kinds),
        )

    @torch.no_grad()
    def see(self, held: Mapping[int, Tensor], rms: Floats, batch: tuple[int, ...]) -> None:
        """Measure the streams of a forward; of several in a step, the last counts.

        Args:
            held: tensors of the forward, by column.
            rms: [columns], their RMS.
            batch: shape of the first tensor of the batch.
        """
        held = {column: tensor for column, tensor in held.items() if tensor.numel()}
        known = self._known(held)
        self._forward = [
            _each(known, _largest),
            _diversities(known, batch),
            np.array([_ratio(rms[term], rms[stream]) for term, stream in self._branches]),
            _headroom(_each([_half(held.get(column)) for column in self._ranged], _largest)),
        ]

    @property
    def has_diversity(self) -> bool:
        """Whether a diversity was measured in the last forward."""
        return bool(self._forward) and bool(is_measured(self._forward[1]).any())

    @torch.no_grad()
    def see_diversity(self, held: Mapping[int, Tensor], batch: tuple[int, ...]) -> bool:
        """Replace the diversities that `see` has measured by those of another forward of the same batch.

        Returns:
            whether each of them could be replaced.
        """
        known, before = self._known(held), self._forward[1]
        is_again = is_measured(before) & np.array([tensor is not None for tensor in known], dtype=bool)
        self._forward[1] = np.where(is_again, _diversities(known, batch), before)
        return bool(is_again[is_measured(before)].all())

    def _known(self, held: Mapping[int, Tensor]) -> list[Tensor | None]:
        """The tensor of each stream, None where it has no tokens."""
        streams = (held.get(column) for column in self._streams)
        return [each if each is not None and each.ndim >= 2 and each.numel() else None for each in streams]

    @torch.no_grad()
    def before_step(self) -> None:
        """Keep samples of the weights."""
        self._old = _sample(self._plan.groups.parameters)

    @torch.no_grad()
    def after_step(self, gradient_squares: Floats) -> Floats:
        """Values of `layout`, after the update.

        Args:
            gradient_squares: ‖g‖² of each parameter.
        """
        groups = self._plan.groups
        lengths = norms([local(p) for p in groups.parameters]).double().cpu().numpy()
        sizes = groups.sizes
        if sizes is None:
            sizes = np.array([max(1, p.numel()) for p in groups.parameters])
        gains = np.sqrt(groups.shared(lengths**2) / sizes)[self._gains]
        forward = self._forward or [np.full(self._num_of_forward, NOT_MEASURED)]
        self._forward = []
        return np.concatenate(
            [
                *forward,
                np.sqrt(groups.by_kind(lengths**2)),
                gains,
                *self._updates(),
                *self._adam(gradient_squares),
            ]
        )

    def _updates(self) -> list[Floats]:
        """Size of the updates and the share of the entries that stay, by kind."""
        groups = self._plan.groups
        assert self._old is not None
        old = self._old.double().cpu().numpy()
        change = _sample(groups.parameters).double().cpu().numpy() - old
        self._old = None
        moved, before, same = (self._by_kind(each) for each in (change**2, old**2, change == 0))
        entries = self._by_kind(np.ones(len(change)))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(before == 0, NOT_MEASURED, np.sqrt(moved / before))
            lost = np.where(entries == 0, NOT_MEASURED, same / entries)  # a rank may hold no part of a kind
        lost[[kind == EMBEDDING for kind in groups.kinds]] = NOT_MEASURED  # most of its rows are in no batch
        return [ratio, lost]

    def _by_kind(self, entries: NDArray[Any]) -> Floats:
        """Sums by kind of one number for each entry of the sample."""
        groups = self._plan.groups
        if self._lengths is None:
            self._lengths = np.array([len(sampled(p)) for p in groups.parameters], dtype=np.int64)
        sums, some = np.zeros(len(self._lengths)), self._lengths > 0  # a shard may be empty
        begins = np.cumsum(self._lengths) - self._lengths
        sums[some] = np.add.reduceat(entries, begins[some], dtype=np.float64)
        return groups.by_kind(sums)

    def _adam(self, gradient_squares: Floats) -> list[Floats]:
        """Lag and rate of Adam by kind."""
        groups = self._plan.groups
        states = _adam_states(groups.parameters, self._optimizers)
        known = np.array([state is not None for state in states])
        if not known.any():
            return [np.full(len(groups.kinds), NOT_MEASURED)] * 2
        table = np.array([(0.0,) * 4 if each is None else each.sums() for each in states])
        squares, sizes, rates, epsilons = (groups.by_kind(column) for column in table.T)
        with np.errstate(divide="ignore", invalid="ignore"):
            lag = np.sqrt(groups.by_kind(gradient_squares * known) / squares)
            rate = rates / (np.sqrt(squares * sizes) + epsilons)
        return [np.where(squares == 0, NOT_MEASURED, each) for each in (lag, rate)]


def _sample(parameters: Sequence[Tensor]) -> Tensor:
    """Some entries of all parameters, a copy."""
    samples = [sampled(p) for p in parameters]
    if not samples:
        return torch.zeros(0)
    first = samples[0]
    if any(each.dtype != first.dtype or each.device != first.device for each in samples):
        samples = [each.double().cpu() for each in samples]
    return torch.cat(samples)


def _each(tensors: Sequence[Tensor | None], figure: Callable[[Tensor], Tensor]) -> Floats:
    found = [figure(tensor) for tensor in tensors if tensor is not None]
    values = iter(torch.stack(found).double().cpu().tolist() if found else [])
    return np.array([NOT_MEASURED if tensor is None else next(values) for tensor in tensors])


def _largest(stream: Tensor) -> Tensor:
    low, high = torch.aminmax(stream)
    return torch.maximum(-low, high).float()


def _half(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is not None and tensor.dtype == torch.float16 else None


def _headroom(largest: Floats) -> Floats:
    """Bits from the largest |x| of each tensor to the limit; zeros have none."""
    is_known = is_measured(largest) & (largest != 0)
    bits = math.log2(LARGEST["float16"]) - np.log2(np.where(is_known, largest, 1))
    return np.where(is_known, bits, NOT_MEASURED)


def _some(tokens_BTD: Tensor) -> Tensor:
    """Up to `SEQUENCES` evenly spaced sequences, a view."""
    return tokens_BTD[:: -(-len(tokens_BTD) // SEQUENCES)]


def _diversities(streams: Sequence[Tensor | None], batch: tuple[int, ...]) -> Floats:
    found = _each(streams, lambda stream: _diversity(_some(sequences(stream, batch)[0]).float()))
    return np.where(found == _NO_DIVERSITY, NOT_MEASURED, found)


def _diversity(tokens_BTD: Tensor) -> Tensor:
    """‖H − h̄‖²/‖H‖² over all sequences, `_NO_DIVERSITY` of zeros.

    The first token is subtracted first, so that small ones are exact.
    """
    differences = tokens_BTD - tokens_BTD[:, :1]
    apart = torch.linalg.vector_norm(differences - differences.mean(1, keepdim=True))
    norm = torch.linalg.vector_norm(tokens_BTD)
    return (apart / norm).square().where(norm != 0, _NO_DIVERSITY)


def _ratio(term: float, stream: float) -> float:
    return term / stream if stream != 0 else NOT_MEASURED


class _Adam(NamedTuple):
    """Adam's mean square of one parameter, the factor that corrects its bias, and the group's settings."""

    mean: Tensor
    left: float
    rate: float
    epsilon: float

    def sums(self) -> tuple[float, float, float, float]:
        """Sums over the entries: mean squares, 1, learning rate, ε."""
        size = self.mean.numel()
        return float(self.mean.sum()) / self.left, size, size * self.rate, size * self.epsilon


def _adam_states(parameters: Iterable[Tensor], optimizers: Iterable[Optimizer]) -> list[_Adam | None]:
    """Adam's state of each parameter, None for parameters without any."""
    found: dict[int, _Adam] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = rate_of(group)
            if rate is None or "betas" not in group:
                continue
            for parameter in group["params"]:
                state: Mapping[str, Any] = optimizer.state.get(parameter, {})
                if "exp_avg_sq" in state and float(state.get("step", 0)) > 0:
                    left = 1 - group["betas"][1] ** float(state["step"])
                    epsilon = float(group.get("eps", 0.0))
                    found[id(parameter)] = _Adam(local(state["exp_avg_sq"]), left, rate, epsilon)
    return [found.get(id(parameter)) for parameter in parameters]
