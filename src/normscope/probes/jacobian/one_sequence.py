"""Cut one sequence out of the batch for the jacobian probe, and compare it with the whole batch.

The shape of a tensor does not show which axis counts sequences: a mask (T, T) is as long as a batch of B = T.
So cuts are tried. A cut is accepted where the first and the last sequence, run alone, have the same values as
in the batch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Site, Stack, read_anatomy
from normscope.anatomy.capture import OpKey, capture_and_ops
from normscope.subjects import Batch, call_model, untouched
from normscope.subjects.feed import map_tensors, tensors_in
from normscope.subjects.memory import is_out_of_memory

MAX_CUTS = 8  # most cuts tried along one axis; four tensors, three of them cut or not, have eight

LAYOUT = {f"aten.{name}.default" for name in ("view", "_unsafe_view", "expand", "clone")}
"""Ops that change no value. Which of them PyTorch runs depends on the sizes, of one batch or of several."""

SAME, GROWTH = 1e-3, 100.0
"""Largest relative distance from the values of the batch; and its largest growth from one site to the next.
Rounding differs between batches of one and four, and a deep stack may amplify it step by step."""


@dataclass(frozen=True)
class Feed:
    """One sequence, and the names of the sites in its forward.

    Attributes:
        batch: the sequence.
        names: site of the anatomy → site in a forward of this batch. Sites count ops, so the model is read
            again where sites may be other ops than in a batch of four, see `same_sites`.
        values: the stream at the ends of blocks, by the sites of the anatomy; without a graph.
        note: "B = 1", or why it is not.
    """

    batch: Batch
    names: Mapping[Site, Site]
    values: Mapping[Site, Tensor]
    note: str


class OtherValues(Exception):
    """A cut batch has other values than the whole batch; the message names the difference."""


def one_sequence(model: nn.Module, batch: Batch, anatomy: Anatomy) -> Feed:
    """The first sequence of `batch`; the whole batch where one sequence alone gives other values."""
    names = {site: site for site in sites_of(anatomy)}
    whole, ops = _run(model, batch, anatomy, names)
    if _length(batch, 0) == 1:
        return Feed(batch, names, whole, "B = 1")

    def fed(one: Batch) -> Feed:
        values, its_ops = _run(model, one, anatomy, names)
        if same_sites(names, ops, its_ops):
            return Feed(one, names, values, "B = 1")
        return fed_alike(model, anatomy, one, "B = 1")

    reason = ""
    mixes_tokens = any(branch.attention for branch in anatomy.branches)  # else they may be cut
    for axis in (0, 1) if mixes_tokens else (0,):
        for cut in _cuts(batch, axis):
            try:
                first = fed(cut(0))
                _require_same(whole, first.values, 0, _length(batch, axis))
                last, _ = _run(model, cut(-1), anatomy, first.names)
                _require_same(whole, last, -1, _length(batch, axis))
                return first
            except Exception as error:  # a forward may raise anything on a batch that it was not made for
                if is_out_of_memory(error):
                    raise
                reason = reason or (str(error).strip().splitlines() or [type(error).__name__])[0]
    note = f"the whole batch at once, not one sequence: {reason or 'nothing to cut'}"
    return Feed(batch, names, whole, note)


def same_sites(sites: Iterable[Site], ops: Sequence[OpKey], others: Sequence[OpKey]) -> bool:
    """Whether each of `sites` is the same op in two forwards with these ops.

    A batch of one has other views than a batch of four, which count only in module calls with a site at one.
    """
    if [op for op in ops if op[2] not in LAYOUT] != [op for op in others if op[2] not in LAYOUT]:
        return False
    calls = {(site.module, site.call) for site in sites if site.op in LAYOUT}
    return [op for op in ops if op[:2] in calls] == [op for op in others if op[:2] in calls]


def sites_of(part: Anatomy | Stack) -> Iterator[Site]:
    """Sites where Jacobians begin and end, and the inputs of the norms between them."""
    for block in part.blocks:
        yield from (block.entry, block.exit)
        for branch in block.branches:
            yield from (branch.entry, branch.output)
            yield from (norm.input for norm in branch.norms)
            yield from (attention.probabilities for attention in branch.attention[:1])


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """`batch` with its floating tensors in `dtype`."""
    return map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, batch)


def _main(batch: Batch) -> Tensor | None:
    """The tensor whose axes are those of the batch: the first with two axes or more, else the first."""
    tensors = tensors_in(batch)
    return next((t for t in tensors if t.ndim > 1), tensors[0] if tensors else None)


def _length(batch: Batch, axis: int) -> int:
    main = _main(batch)
    return 0 if main is None or main.ndim <= axis else main.shape[axis]


def _cuts(batch: Batch, axis: int) -> Iterator[partial[Batch]]:
    """Cuts of `batch` to one sequence, the likely ones first: functions of the sequence's number.

    The main tensor is cut along `axis`; every other tensor along an axis of the same length, or not at all.
    """
    main, length = _main(batch), _length(batch, axis)
    if main is None or length < 2:
        return
    choices: list[list[int | None]] = []
    for tensor in tensors_in(batch):
        fits = [a for a in (axis, 1 - axis) if tensor.shape[a : a + 1] == (length,)]
        choices.append([axis] if tensor is main else [*fits, None])
    for axes in islice(product(*choices), MAX_CUTS):
        yield partial(_cut, batch, axes)


def _cut(batch: Batch, axes: tuple[int | None, ...], index: int) -> Batch:
    """Sequence number `index`, 0 or -1, of every tensor that has an axis of sequences."""
    order = iter(axes)

    def change(tensor: Tensor) -> Tensor:
        axis = next(order)
        return tensor if axis is None else tensor.narrow(axis, index % tensor.shape[axis], 1)

    return map_tensors(change, batch)


def fed_alike(model: nn.Module, anatomy: Anatomy, batch: Batch, note: str) -> Feed:
    """A feed of another batch, under the sites of `anatomy`; `OtherValues` where the reading differs."""
    again = read_anatomy(model, batch)
    if _shape(again) != _shape(anatomy):
        raise OtherValues("one sequence alone has another anatomy")
    names = dict(zip(sites_of(anatomy), sites_of(again), strict=True))
    values, _ = _run(model, batch, anatomy, names)
    return Feed(batch, names, values, note)


def _shape(anatomy: Anatomy) -> list[list[tuple[str, str]]]:
    """Structure that two readings must share for their sites to correspond."""
    return [[(branch.site, branch.placement) for branch in block.branches] for block in anatomy.blocks]


def _run(
    model: nn.Module, batch: Batch, anatomy: Anatomy, names: Mapping[Site, Site]
) -> tuple[dict[Site, Tensor], Sequence[OpKey]]:
    """The stream at the ends of blocks and the first attention in one forward, and the forward's ops.

    The model's state is restored, because a cache of keys would keep an earlier forward's.
    """
    wanted = {site for block in anatomy.blocks for site in (block.entry, block.exit)}
    wanted |= set(_first_attention(anatomy))
    with untouched(model):
        sites = {names[site] for site in wanted}
        _, found, ops = capture_and_ops(model, lambda: call_model(model, batch), sites)
    return {site: found[names[site]].detach() for site in wanted if names[site] in found}, ops


def _first_attention(anatomy: Anatomy) -> list[Site]:
    attention = (a for branch in anatomy.branches if branch.kind == "attention" for a in branch.attention)
    return [each.probabilities for each in islice(attention, 1)]


def _require_same(
    whole: Mapping[Site, Tensor], alone: Mapping[Site, Tensor], index: int, length: int
) -> None:
    """Raise `OtherValues` at the first site where a sequence alone differs from sequence `index`."""
    worst = 0.0
    for site, of_batch in whole.items():
        if site not in alone:
            raise OtherValues("one sequence alone takes another path")
        gaps = [_distance(alone[site], share) for share in _shares(of_batch, alone[site], index, length)]
        if not gaps:
            shapes = f"{tuple(alone[site].shape)} for {tuple(of_batch.shape)} of {length}"
            raise OtherValues(f"a tensor does not have the shape of one sequence: {shapes}")
        if not min(gaps) <= max(SAME, GROWTH * worst):
            raise OtherValues(f"a sequence alone has other values than in the batch: {min(gaps):.1%} apart")
        worst = max(worst, min(gaps))


def _shares(of_batch: Tensor, alone: Tensor, index: int, length: int) -> Iterator[Tensor]:
    """Slices of the batch's tensor that may be sequence `index`: along an axis, or folded into one."""
    if of_batch.ndim != alone.ndim or of_batch.numel() != length * alone.numel():
        return
    longer = [a for a in range(alone.ndim) if of_batch.shape[a] != alone.shape[a]]
    if len(longer) == 1:
        (axis,) = longer
        count = alone.shape[axis]
        yield of_batch.narrow(axis, index % length * count, count)
        yield of_batch.unflatten(axis, (count, length)).select(axis + 1, index)


def _distance(left: Tensor, right: Tensor) -> float:
    """‖x − y‖/‖y‖; values that are not finite count as equal where both are not."""
    x, y = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (left, right))
    size = float(y.norm())
    return float((x - y).norm()) / size if size else float(x.norm())
