"""Damage by quantisation to each part of a stack in turn, in INT8, INT4 and FP8.

Shapes: B batch, T tokens, D width.
"""

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from normscope.claims.at_start import blocks_of, weight_of
from normscope.claims.form import Case, Evidence, Figure, Plot, Setup, claim, lines_at
from normscope.claims.masks import train
from normscope.subjects import Subject, load

MODEL = "nn:decoder,scheme=pre,depth=4,width=32,heads=2"
STEPS, PLANTED, LARGE = 200, 2, 30.0
Quantise = Callable[[Tensor], Tensor]


def integers(bits: int, *, per_channel: bool) -> Quantise:
    """Rounding to symmetric integers; one scale for the tensor, or one for each index of its last axis."""
    top = 2 ** (bits - 1) - 1

    def quantise(x: Tensor) -> Tensor:
        flat = x.abs().flatten(0, -2)
        scale = (flat.amax(0) if per_channel else flat.amax()).clamp_min(1e-30) / top
        return (x / scale).round().clamp(-top, top) * scale

    return quantise


def float8(x: Tensor) -> Tensor:
    """Rounding to e4m3, the tensor scaled to its range."""
    scale = x.abs().amax().clamp_min(1e-30) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


FORMATS: Mapping[str, Quantise] = {
    f"INT{bits} a {what}": integers(bits, per_channel=what == "channel")
    for bits in (8, 4)
    for what in ("tensor", "channel")
} | {"FP8 e4m3": float8}
CLAIMED = ("norm inputs", "norm outputs", "residual sums")
OTHERS = ("queries, keys, values", "attention outputs", "feed-forward hidden", "weights")
Error = tuple[str, float, float]
"""A part, the number of a format, and how far the predictions move, in nats."""


@claim("C31")
def where_it_hurts(setup: Setup) -> Evidence:
    """Shift of the predictions with each part rounded, and its cost in nats."""
    subjects = [load(MODEL, seed=seed, text=setup.text) for seed in setup.seeds]
    cases, errors, losses = list[Case](), list[Error](), list[float]()
    for seed, subject, model in zip(setup.seeds, subjects, train(subjects, STEPS), strict=True):
        losses.append(_loss(model, subject))
        for outliers, each in ((False, model), (True, planted(model))):
            cases += _format_cases(each, subject, outliers, seed, errors)
    formats = ", ".join(f"{index} {name}" for index, name in enumerate(FORMATS))
    return Evidence(
        cases,
        Figure.share("% of formats where both norms and adds are hurt most", cases),
        plots=[
            Plot(
                "Each part quantised in turn",
                f"format ({formats}; 5 to 9: the same with outliers planted)",
                "KL from the unrounded model, nats a token",
                lines_at(errors, marks=True),
                "y",
            )
        ],
        notes=[
            _ranking(errors) + f", after training to {statistics.median(losses):.3g} nats.",
            f"Planted: {PLANTED} channels of each norm × {LARGE:g}, undone behind it.",
        ],
    )


def _format_cases(
    model: nn.Module, subject: Subject, outliers: bool, seed: int, errors: list[Error]
) -> Iterator[Case]:
    truth, before = _predictions(model, subject), _loss(model, subject)
    for index, (name, quantise) in enumerate(FORMATS.items()):
        by_part = {part: _error(model, subject, part, quantise, truth) for part in (*CLAIMED, *OTHERS)}
        errors += [(part, index + 5 * outliers, error) for part, error in by_part.items()]
        rival = max(OTHERS, key=by_part.__getitem__)
        norms = max(by_part["norm inputs"], by_part["norm outputs"]) / by_part[rival]
        add, where = by_part["residual sums"] / by_part[rival], f"{name}, error over that of the {rival}"
        both = min(norms, add)
        parts = {"outliers": both} if outliers else {"": both, "norms": norms, "add": add}
        for part, value in parts.items():
            yield Case(seed, where, value, value > 1, part)
        if name.startswith("INT4") and not outliers:
            with quantised(model, "residual sums", quantise) as rounded:
                cost = _loss(rounded, subject) - before
            where = f"{name}, extra nats"
            yield Case(seed, where, cost, cost >= 0.1, "int4")


def _error(model: nn.Module, subject: Subject, part: str, quantise: Quantise, truth: Tensor) -> float:
    """KL(as it is ‖ with `part` rounded), nats a token."""
    with quantised(model, part, quantise) as rounded:
        found = _predictions(rounded, subject)
    return float((truth.exp() * (truth - found)).sum(-1).mean())


@torch.no_grad()
def _loss(model: nn.Module, subject: Subject) -> float:
    return float(subject.loss(model=model))


@torch.no_grad()
def _predictions(model: nn.Module, subject: Subject) -> Tensor:
    """Log probabilities."""
    logits = subject.forward(model=model).logits
    assert isinstance(logits, Tensor)
    return logits.double().log_softmax(-1)


@contextmanager
def quantised(model: nn.Module, part: str, quantise: Quantise) -> Iterator[nn.Module]:
    """The model with one part rounded wherever it occurs in the blocks."""
    if part == "weights":
        yield _with_rounded_weights(model, quantise)
        return
    before = lambda module, args: (quantise(args[0]), *args[1:])  # noqa: E731
    after = lambda module, args, output: quantise(output)  # noqa: E731
    inputs, outputs = _modules_of(model, part)
    hooks = [module.register_forward_pre_hook(before) for module in inputs]
    hooks += [module.register_forward_hook(after) for module in outputs]
    try:
        yield model
    finally:
        for hook in hooks:
            hook.remove()


def _modules_of(model: nn.Module, part: str) -> tuple[list[nn.Module], list[nn.Module]]:
    """Modules whose input is the part, and modules whose output is; the final norm is left to the head."""
    blocks = blocks_of(model)
    modules = [each for block in blocks for each in block.modules()]
    norms: list[nn.Module] = [each for each in modules if isinstance(each, nn.LayerNorm)]
    attentions = [block.attention for block in blocks]
    ends: dict[str, tuple[list[nn.Module], list[nn.Module]]] = {
        "norm inputs": (norms, []),
        "norm outputs": ([], norms),
        "residual sums": ([], [each for block in blocks for _, each in block.sublayers().values()]),
        "queries, keys, values": ([], [each for a in attentions for each in (a.q, a.k, a.v)]),
        "attention outputs": ([a.o for a in attentions], []),
        "feed-forward hidden": ([block.feed_forward.down for block in blocks], []),
    }
    return ends[part]


@torch.no_grad()
def _with_rounded_weights(model: nn.Module, quantise: Quantise) -> nn.Module:
    """A copy; a scale a channel is one an output of the map."""
    rounded = copy.deepcopy(model)
    for block in blocks_of(rounded):
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(quantise(module.weight.T).T)
    return rounded


@torch.no_grad()
def planted(model: nn.Module) -> nn.Module:
    """A copy that computes the same, with outlier channels behind the norms: γ and β of a few are larger, the
    columns that read them smaller.
    """
    other = copy.deepcopy(model)
    for block in blocks_of(other):
        readers = {
            block.attention_residual: (block.attention.q, block.attention.k, block.attention.v),
            block.feed_forward_residual: (block.feed_forward.up,),
        }
        for residual, maps in readers.items():
            for parameter in residual.norms["branch_in"].parameters():
                parameter[:PLANTED] *= LARGE
            for each in maps:
                weight_of(each)[:, :PLANTED] /= LARGE
    return other


def _ranking(errors: Sequence[Error]) -> str:
    """The parts by how far they move the predictions in INT4 with one scale a tensor, without outliers."""
    index = list(FORMATS).index("INT4 a tensor")
    found = {line.name: line.y[line.x.index(index)] for line in lines_at(errors)}
    ranked = sorted(found, key=found.__getitem__, reverse=True)
    return "INT4 with a scale a tensor moves the predictions, in nats, by " + ", ".join(
        f"{found[part]:.2g} ({part})" for part in ranked
    )
