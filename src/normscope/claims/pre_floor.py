"""Pre-LN's floor: ‖A‖ < 1 in real blocks, and the smallest singular value of a layer, a stack and a product.

Shapes: B batch, T tokens, D width.
"""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from normscope import linalg
from normscope.claims import real_blocks
from normscope.claims.experiments import ROUND_OFF, of_part, share_held, spread
from normscope.claims.form import Case, Evidence, Figure, Line, Setup, claim, lines_at, plots
from normscope.claims.real_blocks import F64, INITS, Layer
from normscope.claims.training import Setting, train_changed
from normscope.linalg import numerical_rank, singular_values, weyl_lower_bound
from normscope.nn import Decoder

SIZES = ((32, 1), (32, 4), (32, 16), (32, 64), (128, 1), (128, 8), (256, 1))
"""Widths and depths."""
TOKENS = 16
KINDS = ("attention", "feed-forward", "both")


@claim("A11")
def pre_ln_floor(setup: Setup) -> Evidence:
    """‖A‖ and σ_min(I + A) of real blocks: the bound, and how often it says anything."""
    cases = [*setup.cases(_floor_cases), *_trained_cases(setup)]
    own, sequences, after, needed = (of_part(cases, part) for part in ("", "sequence", "trained", "needed"))
    whole = [case for case in own if case.at["kind"] == "both"]
    by_kind = ", ".join(f"{kind} {_met(own, kind=kind):.0%}" for kind in KINDS)
    by_init = ", ".join(f"{words} {_met(own, init=words):.0%}" for words in INITS.values())
    return Evidence(
        cases,
        Figure(
            "Pre-LN branches and blocks with ‖A‖ < 1, in %",
            {seed: 100 * _met([case for case in own if case.seed == seed]) for seed in setup.seeds},
        ),
        plots=plots("A11", _lines("depth", whole, width=32), _lines("width", whole, depth=1)),
        notes=[
            f"‖A‖ < 1 by branch: {by_kind}.",
            f"By initialisation: {by_init}.",
            f"Of the whole sequence's maps {share_held(sequences):.0%} have ‖A‖ < 1; after 100 steps of "
            f"training {_met(after):.0%} of those at one token.",
            f"Of {len(needed)} Jacobians with ‖A‖ ≥ 1, {1 - share_held(needed):.0%} have full rank.",
        ],
    )


def _floor_cases(seed: int) -> Iterator[Case]:
    for (init, words), (width, depth) in itertools.product(INITS.items(), SIZES):
        model, ids = real_blocks.started("pre", init=init, depth=depth, width=width, seed=seed, tokens=TOKENS)
        found = real_blocks.sublayers(model, ids)
        for block in sorted({1, (depth + 1) // 2, depth}):
            pair = found[2 * block - 2 : 2 * block]
            where = f"{words}, d = {width}, block {block} of {depth}"
            yield from _block_cases(pair, seed, where, {"init": words, "width": width, "depth": depth})
            if width < 256:
                value = max(_sequence_norm(each) for each in pair)
                yield Case(seed, where, value, value < 1, "sequence")


def _block_cases(
    pair: list[Layer], seed: int, where: str, at: Mapping[str, float | str], part: str = ""
) -> Iterator[Case]:
    """Attention, feed-forward and both: ‖A‖ by the closed form, σ_min by autograd of the whole step."""
    branches = [real_blocks.branch_jacobian(each) for each in pair]
    eye = torch.eye(len(branches[0]), dtype=F64)
    both = (eye + branches[1]) @ (eye + branches[0]) - eye
    steps = [real_blocks.step_jacobian(each) for each in pair]
    for kind, a, j in zip(KINDS, (*branches, both), (*steps, steps[1] @ steps[0]), strict=True):
        norm = float(torch.linalg.matrix_norm(a, 2))
        values = singular_values(j)
        within = norm < 1
        holds = bool(within and values[-1] >= weyl_lower_bound(norm) - ROUND_OFF)
        place = {**at, "kind": kind}
        case = Case(seed, f"{where}, {kind}", norm, holds, part, at=place, within=within)
        yield case
        if not within and not part:
            lost = numerical_rank(values, 1e-12)[0] < len(values)
            yield replace(case, value=float(values[-1]), holds=lost, within=True, part="needed")


def _sequence_norm(layer: Layer) -> float:
    """‖A‖ of the map of all tokens, to 5 %."""
    branch = linalg.JacobianOperator(lambda x: layer(x) - x, layer.x)
    return linalg.sigma_max(branch, tol=0.05).value


def _trained_cases(setup: Setup) -> Iterator[Case]:
    for init in ("xavier", "gpt2"):
        setting = Setting(scheme="pre", depth=6, init=init, steps=100)
        for seed, run in train_changed(setup, setting).items():
            decoder = run.model.to(F64).eval().requires_grad_(False)
            assert isinstance(decoder, Decoder)
            unseen = next(itertools.islice(setting.subject(setup, seed).batches(), setting.steps, None))
            assert isinstance(unseen, dict)
            found = real_blocks.sublayers(decoder, unseen["ids"][:1, :TOKENS])
            for block in (1, 3, 6):
                where = f"{INITS[init]}, d = 32, block {block} of 6, 100 steps"
                yield from _block_cases(found[2 * block - 2 : 2 * block], seed, where, {}, "trained")


def _met(cases: list[Case], **at: str) -> float:
    """Share of the cases at `at` that meet the hypothesis."""
    return statistics.fmean([case.within for case in cases if at.items() <= case.at.items()] or [0.0])


def _lines(key: str, cases: list[Case], **at: int) -> list[Line]:
    """Median ‖A‖ of a seed's cases at `at` by `key`, a line an initialisation."""
    groups = defaultdict(list)
    for case in cases:
        if at.items() <= case.at.items():
            groups[str(case.at["init"]), float(case.at[key]), case.seed].append(case.value)
    points = [(init, value, statistics.median(norms)) for (init, value, _), norms in groups.items()]
    return lines_at(points)


DEPTHS = (1, 8, 64)
STARTS = {
    "N(0, 0.02²), x₀ ~ N(0, 1)": ("normal", False),
    "GPT-2, x₀ ~ N(0, 1)": ("gpt2", False),
    "Xavier, x₀ ~ N(0, 1)": ("xavier", False),
    "N(0, 0.02²), its own embedding": ("normal", True),
}
Loose = dict[tuple[str, int], dict[int, float]]
"""Decades by which the bound is too low: by start, layers and seed, where the condition is met."""


@claim("A15")
def floor_of_a_stack(setup: Setup) -> Evidence:
    """The bound against the measured σ_min, and by how many decades it is loose."""
    cases: list[Case] = []
    loose: Loose = {}
    points: list[tuple[str, float, float]] = []
    for seed, (name, start), depth in itertools.product(setup.seeds, STARTS.items(), DEPTHS):
        bound, middle, smallest, largest = _floors(*start, depth, seed)
        met, layers = largest < 1, 2 * depth
        holds = met and bound <= middle + 1e-9 and middle <= smallest + 1e-9 * depth
        where = f"{name}, {layers} layers, largest ‖A‖ {largest:.3g}"
        cases.append(Case(seed, where, math.exp(smallest), holds, within=met))
        points.append((f"σ_min, {name}", layers, math.exp(smallest)))
        if met:
            loose.setdefault((name, layers), {})[seed] = (smallest - bound) / math.log(10)
            points.append((f"bound, {name}", layers, math.exp(bound)))
    return Evidence(
        cases,
        _looseness(loose, cases),
        plots=plots("A15", lines_at(points)),
        notes=[
            f"{name}, {layers} layers: the bound is too low by {spread(gaps.values())} decades "
            f"(seeds: {len(gaps)})."
            for (name, layers), gaps in loose.items()
        ],
    )


def _looseness(loose: Loose, cases: list[Case]) -> Figure:
    """Decades where the bound is loosest, on the seeds that meet the condition there; else the σ_min."""
    if not loose:
        return Figure.smallest("smallest σ_min", [replace(case, within=True) for case in cases])
    name, layers = max(loose, key=lambda key: max(loose[key].values()))
    return Figure(f"decades that the bound is too low after {layers} layers, {name}", loose[name, layers])


def _floors(init: str, own: bool, depth: int, seed: int) -> tuple[float, float, float, float]:
    """ln Π(1 − ‖A‖), ln Π σ_min(I + A), ln σ_min of the stack, and the largest ‖A‖."""
    model, ids = real_blocks.started("pre", init=init, depth=depth, width=32, seed=seed, tokens=1)
    layers = real_blocks.sublayers(model, ids) if own else real_blocks.one_token(model, 32, seed)[0]
    norms = [float(torch.linalg.matrix_norm(real_blocks.branch_jacobian(layer), 2)) for layer in layers]
    steps = torch.stack([real_blocks.step_jacobian(layer) for layer in layers])
    bound = linalg.product_log_lower_bound([max(0.0, weyl_lower_bound(norm)) for norm in norms])
    middle = linalg.product_log_lower_bound([float(singular_values(step)[-1]) for step in steps])
    return bound, middle, float(linalg.product_log_singular_values(steps).log_values.min()), max(norms)


@claim("A22")
def least_of_a_product(setup: Setup) -> Evidence:
    """Dense singular values of products against the bound by those of the factors."""
    cases = setup.cases(_product_cases)
    return Evidence(cases, Figure.smallest("smallest slack in ln σ_min", cases))


def _product_cases(seed: int) -> Iterator[Case]:
    for width, count in itertools.product((3, 16), (2, 5, 20)):
        for name, factors in _factor_lists(width, count, seed):
            values = singular_values(real_blocks.product(factors))
            bound = linalg.product_log_lower_bound([float(singular_values(f)[-1]) for f in factors])
            slack = float(np.log(values[-1])) - bound
            floor = 1e-8 + width * count * 1e-15 * float(values[0] / values[-1])
            yield Case(seed, f"d = {width}, {count} factors, {name}", slack, bool(slack >= -floor))


def _factor_lists(width: int, count: int, seed: int) -> Iterator[tuple[str, list[Tensor]]]:
    generator, eye = torch.Generator().manual_seed(seed), torch.eye(width, dtype=F64)
    draws = [torch.randn(width, width, dtype=F64, generator=generator) for _ in range(count)]
    orthogonal = [torch.linalg.qr(draw)[0] for draw in draws]
    one = eye + draws[0] / 10
    turns = itertools.cycle((torch.linalg.inv(one), one))
    yield "orthogonal times a number", [(1 + i / count) * each for i, each in enumerate(orthogonal)]
    yield "I + Gaussian/4√d", [eye + draw / (4 * width**0.5) for draw in draws]
    yield "I + upper triangle", [eye + draw.triu(1) / width for draw in draws]
    yield "a matrix and its inverse, in turns", list(itertools.islice(turns, count))
