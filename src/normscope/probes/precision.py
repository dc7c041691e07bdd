"""Effect of float16 and bfloat16 on the model, and the origin of a NaN.

One forward and backward in the model's own precision and one under bfloat16 autocast, both in eval mode.

    precision/float16-headroom    log2(65504 / largest |activation| over all sites), bits; at "" and at the
                                  site where it is largest
    precision/bfloat16-headroom   the same with bfloat16's limit, 3.39e38
    precision/float16-flushed     share of the non-zero gradient values that a cast to float16 turns into 0,
                                  without loss scaling: |g| ≤ 2^-25, half the smallest subnormal (ties go to
                                  even, to 0)
    precision/bfloat16-cosine     cosine between the float32 and the bfloat16-autocast gradient, at ""
                                  and at every block
    precision/eps                 ε of a norm
    precision/eps-ratio           ε over the smallest variance (mean square) that it guards, over tokens
    precision/eps-ratio-median    ε over their median
    precision/non-finite          1 at the first site that is not finite; no row where all is finite

A model whose parameters are not float32 is compared with its float32 copy.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.anatomy import Anatomy, Branch, Norm, Site, capture, measuring
from normscope.probes.attention import MASKED_LOGIT
from normscope.probes.halves import Gradients, Overlap, gradients, overlaps
from normscope.probes.measurement import EXACT, Measurement, not_measured
from normscope.probes.non_finite import first_non_finite
from normscope.probes.norms import TOKENWISE, factor, guarded, norms_of
from normscope.probes.objective import everything_requires_grad, objective, objective_how
from normscope.probes.parameters import Parameters
from normscope.probes.rows import NOT_FINITE, UNDEFINED, at, ratio_row, value_row
from normscope.probes.sums import flushed, is_finite, largest
from normscope.subjects import Subject, untouched

LIMITS = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}  # largest finite number

OF_GRADIENTS = ("float16-flushed", "bfloat16-cosine")

_GUARDED = {"layernorm": "variance", "rmsnorm": "mean square", "l2norm": "sum of squares"}


def measure_precision(subject: Subject, anatomy: Anatomy) -> list[Measurement]:
    """Headroom, flushed gradients, a bfloat16 gradient's direction, ε, the first value that is not finite.

    Two forwards and backwards; where a value is not finite, a third forward or backward under a scan.
    """
    model, batch = subject.model, subject.batch
    parameters = Parameters(model, anatomy)
    weights = {id(parameter): parameter for parameter in parameters.trained()}
    sites = [site for *_, site in _activations(anatomy)] + [n.input for n in norms_of(anatomy).values()]
    with untouched(model), measuring(model), everything_requires_grad(model, batch):
        with untouched(model):  # the next forward must not see this one's state, such as a cache of keys
            loss, captured = capture(model, lambda: objective(subject), sites)
            peaks = list(_peaks(anatomy, captured))
            rows = [*_headroom_rows(peaks), *_eps_rows(anatomy, captured, parameters)]
            del captured  # frees the part of the graph that the backward does not need
            own = gradients(loss, weights)
        is_finite_forward = bool(loss.isfinite()) and all(math.isfinite(peak.largest) for peak in peaks)
        rows += _gradient_rows(subject, anatomy, parameters, own, is_finite_forward)
    return rows


def _gradient_rows(
    subject: Subject, anatomy: Anatomy, parameters: Parameters, own: Gradients | str, forward_is_finite: bool
) -> Iterator[Measurement]:
    """Effect of half precision on the gradients `own`, and the origin of a value that is not finite."""
    gradients_are_finite = isinstance(own, str) or all(map(is_finite, own.values()))
    if not (forward_is_finite and gradients_are_finite):
        yield from (not_measured(f"precision/{name}", "", NOT_FINITE) for name in OF_GRADIENTS)
        yield first_non_finite(subject, parameters)
    elif isinstance(own, str):
        yield from (not_measured(f"precision/{name}", "", own) for name in OF_GRADIENTS)
    else:
        yield from _flushed_rows(anatomy, parameters, own, objective_how(subject))
        yield from _cosine_rows(anatomy, parameters, overlaps(subject, parameters.trained(), own))
        if not all(map(is_finite, parameters.by_name.values())):  # a weight that this batch did not use
            yield first_non_finite(subject, parameters)


def _activations(anatomy: Anatomy) -> Iterator[tuple[str, str, Site]]:
    """Every activation that the anatomy names, in forward order: (site in the table, name, its site)."""
    for stack in anatomy.stacks:
        yield f"{stack.name}.input", "stream", stack.blocks[0].entry
        for block in stack.blocks:
            for branch in block.branches:
                yield from _of_branch(branch)
            yield block.site, "stream", block.exit
        yield f"{stack.name}.hidden", "stream", stack.hidden


def _of_branch(branch: Branch) -> Iterator[tuple[str, str, Site]]:
    for norm in branch.norms:
        yield branch.site, f"output of the norm {norm.path}", norm.output
    for projection in branch.projections:
        yield branch.site, f"output of {projection.parameter}", projection.output
    for attention in branch.attention:
        for name in ("query", "key", "value", "logits"):
            yield branch.site, name, getattr(attention, name)
    yield branch.site, "term that is added", branch.output
    yield branch.site, "sum", branch.sum


@dataclass(frozen=True)
class _Peak:
    """The largest |activation| of one tensor."""

    site: str
    what: str
    largest: float


def _peaks(anatomy: Anatomy, captured: Mapping[Site, Tensor]) -> Iterator[_Peak]:
    for site, what, where in _activations(anatomy):
        tensor = captured.get(where)
        if tensor is not None and tensor.is_floating_point() and tensor.numel():
            tensor = tensor.detach()
            if what == "logits":  # a mask is no activation
                tensor = torch.where(tensor <= MASKED_LOGIT, 0.0, tensor)
            yield _Peak(site, what, largest(tensor))


def _headroom_rows(peaks: list[_Peak]) -> Iterator[Measurement]:
    worst = max(peaks, key=lambda peak: peak.largest, default=None)
    reason = "this forward computed no activation"
    if worst is not None and worst.largest == 0:
        worst, reason = None, "every activation is zero"
    if not all(math.isfinite(peak.largest) for peak in peaks):
        worst, reason = None, NOT_FINITE
    for dtype, limit in LIMITS.items():
        quantity = f"precision/{dtype}-headroom"
        if worst is None:
            yield not_measured(quantity, "", reason, "bits")
            continue
        how = f"{EXACT}; largest is {worst.largest:.4g}, {worst.what} of {worst.site}"
        for site in ("", worst.site):
            yield value_row(quantity, site, math.log2(limit / worst.largest), how, "bits")


def _flushed_rows(
    anatomy: Anatomy, parameters: Parameters, own: Gradients, how: str
) -> Iterator[Measurement]:
    counts = {key: flushed(gradient) for key, gradient in own.items()}
    for site, keys in _groups(anatomy, parameters):
        found = [counts[key] for key in keys if key in counts]
        lost, nonzero = sum(c[0] for c in found), sum(c[1] for c in found)
        yield ratio_row("precision/float16-flushed", site, lost, nonzero, how)


def _cosine_rows(
    anatomy: Anatomy, parameters: Parameters, found: dict[int, Overlap] | str
) -> Iterator[Measurement]:
    quantity = "precision/bfloat16-cosine"
    if isinstance(found, str):
        yield not_measured(quantity, "", found)
        return
    for site, keys in _groups(anatomy, parameters):
        cosine = sum((found[key] for key in keys if key in found), Overlap()).cosine
        if cosine is None:
            yield not_measured(quantity, site, UNDEFINED)
        else:
            yield value_row(quantity, site, cosine)


def _groups(anatomy: Anatomy, parameters: Parameters) -> Iterator[tuple[str, list[int]]]:
    """The whole model and every block: its site and the ids of its parameters."""
    yield "", [id(parameter) for parameter in parameters.trained()]
    for block in anatomy.blocks:
        yield block.site, [id(parameter) for parameter in parameters.of_block(block)]


def _eps_rows(
    anatomy: Anatomy, captured: Mapping[Site, Tensor], parameters: Parameters
) -> Iterator[Measurement]:
    for site, norm in norms_of(anatomy).items():
        if norm.eps is None:
            for name in ("eps", "eps-ratio", "eps-ratio-median"):
                yield not_measured(f"precision/{name}", site, "no ε was seen under its root")
            continue
        yield Measurement("precision/eps", site, norm.eps)
        if reason := _no_ratio(norm, captured, parameters):
            yield not_measured("precision/eps-ratio", site, reason)
            yield not_measured("precision/eps-ratio-median", site, reason)
            continue
        values = guarded(norm, captured[norm.input])
        how = f"{EXACT}; ε over the {_GUARDED[norm.kind]}"
        for name, value in (("eps-ratio", values.min()), ("eps-ratio-median", values.median())):
            ratio = norm.eps / float(value) if value != 0 else math.inf
            yield Measurement(f"precision/{name}", site, ratio, how=how)


def _no_ratio(norm: Norm, captured: Mapping[Site, Tensor], parameters: Parameters) -> str:
    """Why ε cannot be compared with a variance, or the ratio means nothing; "" where it can."""
    if norm.kind not in TOKENWISE:
        return f"a {norm.kind} has no variance per token"
    entering = at(captured, norm.input)
    if isinstance(entering, str):
        return entering
    if not is_finite(entering):
        return NOT_FINITE
    gain = factor(norm, parameters.by_name)  # Swin-V2 starts at γ = 0
    return "its γ is zero, so nothing passes it yet" if gain is not None and not gain.any() else ""
