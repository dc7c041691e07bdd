"""Flow between tokens and between samples: which outputs change when other inputs change.

    wiring/later-tokens    change of the outputs before a token, over the change from it on, when the ids from
                           it on are replaced; site: the first module that shows it
    wiring/own-targets     the same with labels in place of the ids, where a decoder is fed with them
    wiring/other-samples   change of the other samples' outputs, over the sample's own, when the content of
                           one sample is replaced; site: the first module that shows it

All changes are the largest absolute ones. One forward replaces the content of one sample and the later ids of
another; only if it shows something, two more separate the causes. In eval mode, so that a BatchNorm uses its
running statistics.

Shapes: B samples, T tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normscope.anatomy import named_modules
from normscope.probes.measurement import EXACT, Measurement, not_measured
from normscope.probes.wiring.forward import run_without_graph
from normscope.probes.wiring.inputs import Input, inputs_of, other_content, with_tensors
from normscope.probes.wiring.targets import Targets, in_places, relation
from normscope.subjects import Batch, Subject
from normscope.subjects.memory import is_out_of_memory

LATER, OWN, OTHERS = "wiring/later-tokens", "wiring/own-targets", "wiring/other-samples"
ROUNDING = {torch.float16: 4, torch.bfloat16: 4}
"""Machine epsilons of the largest output under which a change is rounding; 16 in full precision."""
MIXING_NORMS = ("batchnorm", "batch_norm")
CONTRASTIVE = "samples mix by design: each row of similarities has its own sample as its target"
PAIRS = "samples mix by design: the outputs compare every pair of samples"
UNCLEAR = "the outputs change by no more than rounding in half precision does"
REFUSALS = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError)


LIKELY = 0.5
"""Share of targets in one relation to the ids from which later ids are replaced."""


@dataclass(frozen=True)
class Place:
    """Ids that stand beside the logits, and the targets there.

    Attributes:
        ids: the tensor in the batch.
        batch_axis: axis of `ids` that counts samples; 1 for (T, B).
        targets_BT: the target of every place, -1 where none counts.
        asked: quantity that says whether outputs see later ids; "" where the task leaves that open.
    """

    ids: Tensor
    batch_axis: int
    targets_BT: Tensor
    asked: str

    @property
    def ids_BT(self) -> Tensor:
        """The ids, samples first."""
        return self.ids.T if self.batch_axis else self.ids


def find_place(targets: Targets | str, inputs: list[Input]) -> Place | None:
    """The ids beside the logits whose relation to the targets is closest; None without ids that fit.

    Samples come first unless the targets say that time does.
    """
    best, place = -1.0, None
    for ids in (i.tensor for i in inputs if i.kind == "ids"):
        laid = None if isinstance(targets, str) else in_places(targets.ids, ids)
        if laid is None:
            continue
        for axis, (targets_BT, ids_BT) in enumerate(((laid, ids), (laid.T, ids.T))):
            shares = [relation(targets_BT, ids_BT, shift) for shift in range(3)]
            if max(shares) > best and (axis == 0 or max(shares) >= LIKELY):
                best, place = (
                    max(shares),
                    Place(ids, axis, targets_BT, LATER if max(shares) >= LIKELY else ""),
                )
    return place


def find_fed_labels(targets: Targets | str, inputs: list[Input]) -> Place | None:
    """Labels that the model reads and that are the targets: a decoder may be fed with them, shifted."""
    for labels in (i.tensor for i in inputs if i.kind == "labels" and i.name and i.tensor.ndim == 2):
        laid = None if isinstance(targets, str) else in_places(targets.ids, labels)
        if laid is not None and not labels.is_floating_point() and relation(laid, labels, 0) == 1:
            return Place(labels, 0, laid, OWN)
    return None


def flow_rows(
    subject: Subject, output: Tensor | None, place: Place | None, targets: Targets | str
) -> Iterator[Measurement]:
    """Both rows; `output` is the main one of the fixed batch. Call inside `forwards`."""
    if _is_contrastive(targets):
        yield not_measured(LATER, "", CONTRASTIVE)
        yield not_measured(OTHERS, "", CONTRASTIVE)
        return
    try:
        yield from _Flow(subject, output, place).rows()
    except REFUSALS as error:
        if is_out_of_memory(error):
            raise
        reason = f"the model refuses other content: {' '.join(str(error).split())[:160]}"
        yield not_measured(LATER, "", reason)
        yield not_measured(OTHERS, "", reason)


def _is_contrastive(targets: Targets | str) -> bool:
    """Whether the logits are similarities (B, B) of which each row's target is its own sample."""
    if isinstance(targets, str) or targets.ids.ndim != 1 or len(targets.ids) != targets.logits.shape[-1]:
        return False
    return targets.ids.tolist() == list(range(len(targets.ids)))


class _Flow:
    """The comparison of forwards.

    Attributes:
        whole: the sample whose content is replaced.
        part: the sample whose later ids are replaced; None where the task leaves open what it may see.
        split: the place from which they are replaced.
    """

    def __init__(self, subject: Subject, output: Tensor | None, place: Place | None) -> None:
        self.subject, self.place = subject, place
        self.content = _content(subject)
        self.axis = place.batch_axis if place is not None else 0
        self.size = self.content[0].shape[self.axis] if self.content else 0
        self.before = self._laid(output)
        # One in the middle: with a causal mask over the batch only the samples after it would see it.
        self.whole = self.size // 2 if self.size > 2 else 0
        asked = place is not None and place.asked
        self.part = (1 if self.size == 2 else 0) if asked else None
        self.split = (
            _split(place.targets_BT[self.part]) if place is not None and self.part is not None else None
        )

    def rows(self) -> Iterator[Measurement]:
        if self.before is None:
            reason = "no output has an axis of the batch's samples"
            yield not_measured(LATER, "", reason)
            yield not_measured(OTHERS, "", reason)
            return
        quiet = self._is_quiet()
        yield self._later(quiet)
        yield self._others(quiet)

    def _is_quiet(self) -> bool:
        """Whether one forward with both changes leaves alone what neither may change."""
        if self.size < 2:
            return False
        part = None if self.split is None else self.part
        after = self._after(self._changed(whole=self.whole, part=part))
        if after is None:
            return False
        judged = [self._change(after, [row]) for row in self._without(self.whole, part)]
        if part is not None:
            judged.append(self._earlier_change(after))
        return all(change == 0 for change in judged) and self._change(after, [self.whole]) > 0

    def _later(self, quiet: bool) -> Measurement:
        if self.place is None or not self.place.asked:
            return not_measured(LATER, "", "the targets are not the ids beside the logits, in any place")
        if self.split is None or self.part is None:
            return not_measured(self.place.asked, "", "fewer than two targets of the sample count")
        if quiet:
            return Measurement(self.place.asked, "", 0.0)
        batch = self._changed(whole=None, part=self.part)
        after = self._after(batch)
        own = 0.0 if after is None else self._change(after, [self.part], slice(self.split, None))
        if after is None or not own > 0:
            return not_measured(self.place.asked, "", "the outputs do not depend on these ids")
        ratio = self._earlier_change(after) / own
        if math.isnan(ratio):
            return not_measured(self.place.asked, "", UNCLEAR)
        site = self._first_module(batch, [self.part], slice(0, self.split)) if ratio else ""
        how = f"{EXACT}; ids from place {self.split} on were replaced"
        return Measurement(self.place.asked, site, ratio, how=how)

    def _others(self, quiet: bool) -> Measurement:
        if self.size < 2:
            return not_measured(OTHERS, "", "the batch has one sample")
        if quiet:
            return Measurement(OTHERS, "", 0.0)
        found = self._mixing()
        if found is not None and found.value and self._compares_pairs():
            return not_measured(OTHERS, "", PAIRS)
        if found is not None and found.value and self.place is None and self.content[0].ndim > 1:
            # The batch may be on the second axis: (T, B, d).
            self.axis, self.size = 1, self.content[0].shape[1]
            self.whole = self.size // 2 if self.size > 2 else 0
            other = self._mixing()
            if other is not None and other.value == 0:
                return other
        if found is not None:
            return found
        return not_measured(OTHERS, "", "the outputs do not depend on the inputs")

    def _compares_pairs(self) -> bool:
        """Whether the output is (B, B, …) because the batch has B samples: (B - 1, B - 1, …) for one less."""
        if self.before is None or self.before.shape[:2] != (self.size, self.size) or self.axis:
            return False
        tensors = (t for t in tree_leaves(self.subject.batch) if isinstance(t, Tensor) and t.ndim)
        fewer = {id(t): t[:-1] for t in tensors if t.shape[0] == self.size}
        try:
            output = run_without_graph(self.subject, with_tensors(self.subject.batch, fewer))
        except REFUSALS as error:  # another axis has B places too: the model fits its tensors to it
            if is_out_of_memory(error):
                raise
            return False
        expected = (self.size - 1, self.size - 1, *self.before.shape[2:])
        return output is not None and output.shape == expected

    def _mixing(self) -> Measurement | None:
        batch = self._changed(whole=self.whole, part=None)
        after = self._after(batch)
        if after is None or self.before is None or self.size < 2:
            return None
        own = self._change(after, [self.whole])
        if not own > 0:
            return None
        others = self._without(self.whole)
        ratio = self._change(after, others) / own
        if math.isnan(ratio):
            return not_measured(OTHERS, "", UNCLEAR)
        site = self._first_module(batch, others, slice(None)) if ratio else ""
        kind = "batch-norm; " if ratio and self._is_batch_norm(site) else ""
        if ratio and not kind and self._selects_tokens(site):
            kind = "experts; "
        how = f"{EXACT}; {kind}the content of sample {self.whole} was replaced"
        return Measurement(OTHERS, site, ratio, how=how)

    def _without(self, *rows: int | None) -> list[int]:
        return [row for row in range(self.size) if row not in rows]

    def _is_batch_norm(self, site: str) -> bool:
        module = dict(named_modules(self.subject.model)).get(site)
        if module is None:
            return False
        names = " ".join(type(m).__name__ for m in module.modules()).lower()
        return isinstance(module, nn.modules.batchnorm._BatchNorm) or any(n in names for n in MIXING_NORMS)

    def _selects_tokens(self, site: str) -> bool:
        """Whether a module has twins in a list, and each gets a part of the tokens that it gives: experts."""
        module = dict(named_modules(self.subject.model)).get(site)
        if module is None:
            return False
        lists = [list(m.children()) for m in module.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict)]
        experts = [
            each for twins in lists if len(twins) > 1 and len({*map(type, twins)}) == 1 for each in twins
        ]
        read: list[int] = []
        given: list[int] = []

        def count(counts: list[int], value: Any) -> None:
            tensor = value[0] if isinstance(value, tuple) and value else value
            if isinstance(tensor, Tensor) and tensor.ndim:
                counts.append(tensor.shape[:-1].numel())

        handles = [m.register_forward_hook(lambda _, inputs, __: count(read, inputs)) for m in experts]
        handles.append(module.register_forward_hook(lambda _, __, output: count(given, output)))
        try:
            run_without_graph(self.subject, self.subject.batch)
        finally:
            for handle in handles:
                handle.remove()
        return bool(read) and bool(given) and max(read) < max(given)

    def _changed(self, *, whole: int | None, part: int | None) -> Batch:
        """The batch with the content of one sample replaced, and the later ids of another."""
        changed = {}
        for tensor in self.content:
            if tensor.ndim <= self.axis or tensor.shape[self.axis] != self.size:
                continue
            twin, other = tensor.clone(), other_content(tensor)
            if whole is not None:
                twin.select(self.axis, whole).copy_(other.select(self.axis, whole))
            if part is not None and self.place is not None and tensor is self.place.ids:
                row, new = twin.select(self.axis, part), other.select(self.axis, part)
                # A decoder may begin with the last label (mBART's language code), which therefore stays.
                end = -1 if self.place.asked == OWN else None
                row[self.split : end] = new[self.split : end]
            changed[id(tensor)] = twin
        return with_tensors(self.subject.batch, changed)

    def _after(self, batch: Batch) -> Tensor | None:
        return self._laid(run_without_graph(self.subject, batch))

    def _laid(self, output: Tensor | None) -> Tensor | None:
        """An output with the axes of the content in front; flat rows (B·T, V) are folded."""
        if output is None or not self.content:
            return None
        output, shape = output.detach(), self.content[0].shape
        if output.ndim > self.axis and output.shape[self.axis] == self.size:
            return output
        if len(shape) == 2 and output.shape[0] == shape.numel():
            return output.unflatten(0, shape)
        return None

    def _earlier_change(self, after: Tensor) -> float:
        """Change at the places before the split whose targets count, of the sample with other later ids."""
        assert self.place is not None
        assert self.part is not None
        counted = self.place.targets_BT[self.part, : self.split] >= 0
        return self._change(after, [self.part], slice(0, self.split), counted)

    def _change(
        self, after: Tensor, rows: list[int], places: slice = slice(None), counted: Tensor | None = None
    ) -> float:
        """Largest change over some samples and places; 0 where it is rounding.

        NaN in half precision for a change of the size of rounding, which may be more than that.
        """
        assert self.before is not None
        if after.shape != self.before.shape:
            return 0.0
        old, new = (_cut(tensor, self.axis, rows, places, counted) for tensor in (self.before, after))
        if torch.equal(old, new):
            return 0.0
        change = (new - old).abs()[old.isfinite() & new.isfinite()]
        largest = float(change.max()) if change.numel() else 0.0
        if largest > _rounding(self.before):
            return largest
        return math.nan if largest and old.dtype in ROUNDING else 0.0

    def _first_module(self, batch: Batch, rows: list[int], places: slice) -> str:
        """The first module, by the end of its call, whose output changes where none may."""
        seen = [self._module_outputs(each, rows, places) for each in (self.subject.batch, batch)]
        for name, old in seen[0].items():
            new = seen[1].get(name)
            if new is None or new.shape != old.shape or not old.numel():
                continue
            if float((new - old).abs().nan_to_num().max()) > _rounding(old):
                return name
        return ""

    def _tokens(self, places: slice) -> int | None:
        """Number of tokens that a tensor needs to be cut at `places`; None for any."""
        cuts = places != slice(None) and self.place is not None
        return self.place.ids_BT.shape[1] if cuts and self.place is not None else None

    def _module_outputs(self, batch: Batch, rows: list[int], places: slice) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def keep(name: str) -> Any:
            def hook(module: nn.Module, arguments: Any, output: Any) -> None:
                tensor = output[0] if isinstance(output, tuple) and output else output
                if name in found or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                    return
                if tensor.ndim < 3 or tensor.shape[self.axis] != self.size:
                    return
                if self._tokens(places) not in (None, tensor.shape[1 - self.axis]):
                    return
                found[name] = _cut(tensor, self.axis, rows, places, None).detach().clone()

            return hook

        handles = [
            m.register_forward_hook(keep(name)) for name, m in named_modules(self.subject.model) if name
        ]
        try:
            run_without_graph(self.subject, batch)
        finally:
            for handle in handles:
                handle.remove()
        return found


def _rounding(tensor: Tensor) -> float:
    """Largest change that counts as rounding, by the largest finite value."""
    low, high = torch.aminmax(tensor.detach())
    scale = max(-float(low), float(high))
    if not math.isfinite(scale):
        finite = tensor[tensor.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
    return ROUNDING.get(tensor.dtype, 16) * torch.finfo(tensor.dtype).eps * scale


def _cut(tensor: Tensor, axis: int, rows: list[int], places: slice, counted: Tensor | None) -> Tensor:
    """Some samples, and of those some places, of a tensor with samples on `axis` and places on the other."""
    if len(rows) == 1:  # a view: a copy of all logits would cost as much as a layer
        part = tensor.narrow(axis, rows[0], 1)
    else:
        part = tensor.index_select(axis, torch.tensor(rows, device=tensor.device, dtype=torch.long))
    if places == slice(None) and counted is None:
        return part
    part = part.movedim(axis, 0)[:, places]
    return part if counted is None else part[:, counted.to(part.device)]


def _content(subject: Subject) -> list[Tensor]:
    """Tensors of the batch that hold the samples' content, ids first; labels where the model reads them."""
    inputs = inputs_of(subject)
    found = [i.tensor for i in inputs if i.kind == "ids"] + [i.tensor for i in inputs if i.kind == "floats"]
    labels = [i.tensor for i in inputs if i.kind == "labels" and i.name and i.tensor.ndim == 2]
    found += [tensor for tensor in labels if not tensor.is_floating_point()]
    return list({id(tensor): tensor for tensor in found}.values())


def _split(targets_T: Tensor) -> int | None:
    """The place from which ids are replaced: behind the middle of the targets that count.

    Not on a power of two, where a mask of chunks would hide what it lets through.
    """
    counted = (targets_T >= 0).nonzero().flatten().tolist()
    if len(counted) < 2:
        return None
    return min(counted[len(counted) // 2] + 2, targets_T.numel() - 1)
