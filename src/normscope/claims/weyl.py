"""The identity as a floor: σ_min(I + A) ≥ 1 − ‖A‖, how often ‖A‖ < 1, and Table 1.

Shapes: B batch, T tokens, D width.
"""

import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from normscope.claims.claim import Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure, Line, Plot
from normscope.claims.look import Look
from normscope.claims.norm_jacobian import distance
from normscope.claims.real_blocks import (
    F64,
    Sublayer,
    at_last_token,
    jacobian,
    started,
    sublayers,
    trained_decoders,
)
from normscope.claims.sources import Source
from normscope.linalg import (
    JacobianOperator,
    layer_norm_jacobian,
    left_kernel,
    numerical_rank,
    sigma_max,
    singular_values,
    weyl_interval,
    weyl_lower_bound,
)
from normscope.nn import Residual, Where

ROUND_OFF = 1e-10
"""Error, beside the sizes of the matrices, that float64 explains."""


@claim(
    "A10",
    Source("000", "Lemma 4.4", "Weyl 不等式的推论"),
    Source("000", "(31)–(34)"),
    says="σ_min(I + A) ≥ 1 − ‖A‖ for every square A.",
    hypothesis="1 − ‖A‖ is nowhere above the σ_min(I + A) of a float64 SVD by more than 1e-10 (1 + ‖A‖): "
    "random, orthogonal, skew, nilpotent and rank-one A of norms 1e-8 to 1e3, and those made to attain it, "
    "d = 3 to 64",
    parts={
        "pairs": Sentence("(32): σ_i(B + C) ≥ σ_i(B) − ‖C‖ for every i."),
        "symmetric": Sentence("(33): λ_i(H₁ + H₂) ≥ λ_i(H₁) + λ_d(H₂) for symmetric matrices."),
        "printed": Sentence(
            "The printed route, (33) with BᵀB and CᵀC for (B + C)ᵀ(B + C): "
            "λ_i((B + C)ᵀ(B + C)) ≥ λ_i(BᵀB) + λ_d(CᵀC).",
            "the cross terms BᵀC + CᵀB, which it leaves out, have no negative eigenvalue",
        ),
    },
)
def weyl(look: Look) -> Evidence:
    """The bound against dense singular values, and the step of its proof that drops two terms."""
    cases = [case for seed in look.seeds for case in (*_bound_cases(seed), *_pair_cases(seed))]
    own = [case for case in cases if not case.part]
    tight = sum(case.value <= ROUND_OFF for case in own)
    routes = [case for case in cases if case.part == "printed"]
    return Evidence(
        cases=cases,
        figure=Figure(
            "smallest slack σ_min(I + A) − (1 − ‖A‖), in 1 + ‖A‖",
            {seed: min(case.value for case in own if case.seed == seed) for seed in look.seeds},
        ),
        notes=[
            f"{tight} of {len(own)} matrices attain the bound.",
            f"The printed route fails for {sum(not case.holds for case in routes)} of {len(routes)} pairs, "
            f"by up to {-min(case.value for case in routes):.3g} of ‖B‖² + ‖C‖².",
        ],
        of="matrices or pairs",
    )


def _bound_cases(seed: int) -> Iterator[Case]:
    for width in (3, 16, 64):
        eye = torch.eye(width, dtype=F64)
        for name, a in _perturbations(width, seed):
            norm = float(singular_values(a)[0])
            slack = float(singular_values(eye + a)[-1]) - weyl_lower_bound(norm)
            value = slack / (1 + norm)
            yield Case(seed=seed, where=f"d = {width}, A = {name}", value=value, holds=value >= -ROUND_OFF)


def _perturbations(width: int, seed: int) -> Iterator[tuple[str, Tensor]]:
    """A [D, D] by name."""
    random = _gaussian(width, seed)
    orthogonal = torch.linalg.qr(random)[0]
    unit = orthogonal[:, :1]
    eye = torch.eye(width, dtype=F64)
    shapes = {
        "I": eye,
        "uuᵀ": unit @ unit.T,
        "an orthogonal Q": orthogonal,
        "a shift": torch.diag(torch.ones(width - 1, dtype=F64), 1),
        "skew": (random - random.T) / width**0.5,
        "Gaussian": random / width**0.5,
        "Gaussian of rank one": random[:, :1] @ random[:1] / width,
    }
    for name, shape in shapes.items():
        for scale in (-1e3, -2.0, -1.0, -0.5, -1e-8, 0.5, 2.0):
            yield f"{scale:g} · {name}", scale * shape


def _pair_cases(seed: int) -> Iterator[Case]:
    for width in (3, 16, 64):
        for name, b, c in _pairs(width, seed):
            where = f"d = {width}, {name}"
            size = float(b.norm() ** 2 + c.norm() ** 2)
            of_b, of_c, of_sum = (singular_values(each) for each in (b, c, b + c))
            slack = float((of_sum - weyl_interval(of_b, of_c[0])[0]).min() / (of_b[0] + of_c[0]))
            yield Case(seed=seed, where=where, value=slack, holds=slack >= -ROUND_OFF, part="pairs")
            first, second = b + b.T, c + c.T
            slack = _eigen_slack(first + second, first, second) / size**0.5
            yield Case(seed=seed, where=where, value=slack, holds=slack >= -ROUND_OFF, part="symmetric")
            slack = _eigen_slack((b + c).T @ (b + c), b.T @ b, c.T @ c) / size
            cross = float(torch.linalg.eigvalsh(b.T @ c + c.T @ b)[0]) / size
            yield Case(
                seed=seed,
                where=where,
                value=slack,
                holds=slack >= -ROUND_OFF,
                met=cross >= -ROUND_OFF,
                part="printed",
            )


def _pairs(width: int, seed: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    b, c = _gaussian(width, seed), _gaussian(width, seed + 1000)
    eye = torch.eye(width, dtype=F64)
    yield "B and C Gaussian", b, c
    yield "B and C Gaussian, C a tenth", b, 0.1 * c
    yield "B = I, C Gaussian", eye, c / width**0.5
    yield "B = I, C = −I/2", eye, -0.5 * eye
    yield "B Gaussian, C = −B", b, -b
    yield "B Gaussian, C = B/2", b, 0.5 * b
    yield "B = I, C skew", eye, (c - c.T) / width**0.5


def _eigen_slack(whole: Tensor, first: Tensor, second: Tensor) -> float:
    """min_i λ_i(whole) − λ_i(first) − λ_d(second)."""
    values = [torch.linalg.eigvalsh(each) for each in (whole, first, second)]
    return float((values[0] - values[1] - values[2][0]).min())


def _gaussian(width: int, seed: int) -> Tensor:
    return torch.randn(width, width, dtype=F64, generator=torch.Generator().manual_seed(seed))


INITS = {"xavier": "Xavier", "normal": "N(0, 0.02²)", "gpt2": "GPT-2", "torch": "PyTorch's own"}
SIZES = {32: (1, 4, 16, 64), 128: (1, 8), 256: (1,)}
"""Width → depths."""
TOKENS = 16


@claim(
    "A11",
    Source("000", "Theorem 4.6", "Pre-LN 的梯度下界"),
    Source("000", "(35)–(38)"),
    Source("000", "§7", "梯度在所有方向上均有正下界"),
    says="A Pre-LN layer's Jacobian I + A has full rank, with σ_min ≥ 1 − ‖A‖ > 0.",
    condition="‖A‖ < 1",
    hypothesis="0 < 1 − ‖A‖ ≤ σ_min at the last of 16 tokens: attention, feed-forward and both, in the "
    "first, middle and last block of Pre-LN decoders at their start, 1 to 64 blocks, widths 32 to 256, four "
    "initialisations",
    parts={
        "sequence": Sentence("The condition ‖A‖ < 1 is met by the map of the whole sequence."),
        "trained": Sentence("The same at one token after 100 steps of training.", "‖A‖ < 1"),
        "needed": Sentence("The condition is needed: where ‖A‖ ≥ 1 the Jacobian loses a direction."),
    },
)
def pre_ln_floor(look: Look) -> Evidence:
    """‖A‖ and σ_min(I + A) of real blocks: the bound, and how often it says anything."""
    cases = [case for seed in look.seeds for case in _floor_cases(seed)]
    cases += list(_trained_cases(look))
    token = [case for case in cases if not case.part]
    kinds = ("attention", "feed-forward", "both")
    shares = ", ".join(f"{kind} {_share(_of(token, kind)):.0%}" for kind in kinds)
    by_init = ", ".join(f"{words} {_share(_of(token, words)):.0%}" for words in INITS.values())
    sequence = [case for case in cases if case.part == "sequence"]
    needed = [case for case in cases if case.part == "needed"]
    trained = [case for case in cases if case.part == "trained"]
    return Evidence(
        cases=cases,
        figure=Figure(
            "Pre-LN branches and blocks with ‖A‖ < 1, in %",
            {s: 100 * _share([case for case in token if case.seed == s]) for s in look.seeds},
        ),
        plots=[_norms_plot(token, look), _widths_plot(token, look)],
        notes=[
            f"‖A‖ < 1 by branch: {shares}.",
            f"By initialisation: {by_init}.",
            f"Of the whole sequence's maps {_held(sequence):.0%} have ‖A‖ < 1; after 100 steps of training "
            f"{_share(trained):.0%} of those at one token.",
            f"Of {len(needed)} Jacobians with ‖A‖ ≥ 1, {1 - _held(needed):.0%} have full rank.",
        ],
        of="maps: four initialisations × widths 32, 128, 256 × depths 1 to 64",
        parts_of={"trained": "maps: two initialisations × blocks 1, 3, 6, after training"},
    )


def _floor_cases(seed: int) -> Iterator[Case]:
    for init, words in INITS.items():
        for width, depths in SIZES.items():
            for depth in depths:
                model, ids = started("pre", init=init, depth=depth, width=width, seed=seed, tokens=TOKENS)
                found = sublayers(model, ids)
                for block in sorted({1, (depth + 1) // 2, depth}):
                    pair = found[2 * block - 2 : 2 * block]
                    where = f"{words}, d = {width}, block {block} of {depth}"
                    yield from _block_cases(pair, seed, where)
                    if width < 256:
                        yield _sequence_case(pair, seed, where)


def _block_cases(pair: list[Sublayer], seed: int, where: str, part: str = "") -> Iterator[Case]:
    """Attention, feed-forward and both: ‖A‖ by the closed form, σ_min by autograd of the whole step."""
    branches = [branch_jacobian(each) for each in pair]
    eye = torch.eye(len(branches[0]), dtype=F64)
    both = (eye + branches[1]) @ (eye + branches[0]) - eye
    steps = [jacobian(*at_last_token(each.step, each.x)) for each in pair]
    for kind, a, j in zip(
        ("attention", "feed-forward", "both"), (*branches, both), (*steps, steps[1] @ steps[0]), strict=True
    ):
        norm = float(torch.linalg.matrix_norm(a, 2))
        values = singular_values(j)
        bound, met = weyl_lower_bound(norm), norm < 1
        holds = met and values[-1] >= bound - ROUND_OFF
        name = f"{where}, {kind}"
        yield Case(seed=seed, where=name, value=norm, holds=bool(holds), met=met, part=part)
        if not met and not part:
            lost = numerical_rank(values, 1e-12)[0] < len(values)
            yield Case(seed=seed, where=name, value=float(values[-1]), holds=lost, part="needed")


def branch_jacobian(sublayer: Sublayer) -> Tensor:
    """A = J_F(LN(x)) · J_LN(x) at the last token."""
    weight, eps = sublayer.norm("branch_in")
    with torch.no_grad():
        u = sublayer.residual.norms["branch_in"](sublayer.x)
    of_branch = jacobian(*at_last_token(sublayer.apply, u))
    return of_branch @ layer_norm_jacobian(sublayer.x[0, -1], weight, eps)


def _sequence_case(pair: list[Sublayer], seed: int, where: str) -> Case:
    """The larger of ‖A‖ of the attention's and of the feed-forward's map of all tokens, to 5 %."""

    def norm(sublayer: Sublayer) -> float:
        branch = JacobianOperator(lambda x: sublayer.step(x) - x, sublayer.x)
        return sigma_max(branch, tol=0.05).value

    value = max(norm(each) for each in pair)
    return Case(seed=seed, where=where, value=value, holds=value < 1, part="sequence")


def _trained_cases(look: Look) -> Iterator[Case]:
    for init in ("xavier", "gpt2"):
        model = f"nn:decoder,scheme=pre,init={init},depth=6,width=32,heads=2"
        for seed, decoder, ids in trained_decoders(look, model, lr=3e-3, steps=100):
            found = sublayers(decoder, ids[:1, :TOKENS])
            for block in (1, 3, 6):
                where = f"{INITS[init]}, d = 32, block {block} of 6, 100 steps"
                yield from _block_cases(found[2 * block - 2 : 2 * block], seed, where, "trained")


def _of(cases: list[Case], word: str) -> list[Case]:
    return [case for case in cases if word in case.where.split(", ") or case.where.startswith(word)]


def _share(cases: list[Case]) -> float:
    return sum(case.met for case in cases) / len(cases) if cases else 0.0


def _norms_plot(cases: list[Case], look: Look) -> Plot:
    """Median ‖A‖ of whole blocks by depth, d = 32."""
    chosen = [case for case in cases if "d = 32," in case.where and case.where.endswith("both")]
    lines = [
        Line.over_seeds(words, {depth: _medians(chosen, words, f"of {depth},", look) for depth in SIZES[32]})
        for words in INITS.values()
    ]
    return Plot("‖A‖ of whole Pre-LN blocks, d = 32", "blocks", "median ‖A‖", lines, "xy", {"‖A‖ = 1": 1.0})


def _widths_plot(cases: list[Case], look: Look) -> Plot:
    """Median ‖A‖ of whole blocks by width, a single block."""
    chosen = [case for case in cases if "block 1 of 1," in case.where and case.where.endswith("both")]
    lines = [
        Line.over_seeds(words, {width: _medians(chosen, words, f"d = {width},", look) for width in SIZES})
        for words in INITS.values()
    ]
    return Plot("‖A‖ of a single block by width", "width", "median ‖A‖", lines, "xy", {"‖A‖ = 1": 1.0})


def _medians(cases: list[Case], words: str, where: str, look: Look) -> list[float]:
    """Of each seed."""
    return [
        statistics.median(c.value for c in _of(cases, words) if c.seed == seed and where in c.where)
        for seed in look.seeds
    ]


@claim(
    "A12",
    Source("000", "Table 1", "Post-LN 与 Pre-LN 的结构性对比"),
    Source("000", "§5"),
    says="Every row of Table 1 is right: form, place of the identity, rank, kernel, directions erased.",
    condition="‖A‖ < 1, in the Pre-LN column",
    hypothesis="each row measured by autograd and float64 SVD, errors under 1e-10, on real blocks of both "
    "placements (four initialisations, widths 16 and 64, ε = 0) and on an F made to cancel the identity",
    parts={
        "form": Sentence("Row 1: J_LN(z)(I + J_F) for Post-LN, I + J_F J_LN for Pre-LN."),
        "identity": Sentence("Row 2: the identity path comes out as J_LN(z) in Post-LN, as I in Pre-LN."),
        "rank": Sentence("Row 3: rank ≤ d − 2 in Post-LN, = d in Pre-LN.", "‖A‖ < 1, in the Pre-LN column"),
        "kernel": Sentence("Row 4: kernel ≥ 2 in Post-LN, 0 in Pre-LN.", "‖A‖ < 1, in the Pre-LN column"),
        "erased": Sentence(
            "Row 5, which names no condition: two gradients or more are erased in Post-LN, none in Pre-LN.",
            "‖A‖ < 1, in the Pre-LN column",
        ),
    },
)
def table_1(look: Look) -> Evidence:
    """Each cell of the table, a case each."""
    rows = [case for seed in look.seeds for case in _table_cases(seed)]
    whole = [replace(case, part="", where=f"{case.part}: {case.where}") for case in rows]
    ranks = [case for case in rows if case.part == "rank" and "Pre-LN" in case.where and not case.met]
    full = sum(case.holds for case in ranks)
    return Evidence(
        cases=[*whole, *rows],
        figure=Figure(
            "cells of the table that are right, in %",
            {seed: 100 * _held([case for case in whole if case.seed == seed]) for seed in look.seeds},
        ),
        notes=[f"Of {len(ranks)} Pre-LN Jacobians with ‖A‖ ≥ 1, {full} have full rank all the same."],
        of="cells",
    )


def _held(cases: list[Case]) -> float:
    return sum(case.holds for case in cases) / len(cases)


def _table_cases(seed: int) -> Iterator[Case]:
    for width in (16, 64):
        for init, words in INITS.items():
            for scheme, column in (("post", "Post-LN"), ("pre", "Pre-LN")):
                model, ids = started(scheme, init=init, depth=4, width=width, seed=seed, eps=0)
                for each in (*sublayers(model, ids)[:2], *sublayers(model, ids)[-2:]):
                    where = f"{column}, {words}, d = {width}, {each.kind} of block {each.block}"
                    yield from _rows(each, seed, where)
        yield from _rows(_cancelling(width, seed), seed, f"Pre-LN, F(u) = −σ(x) u, d = {width}")


class _Times(torch.nn.Module):
    """F(u) = c u."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, u: Tensor) -> Tensor:
        return self.factor * u


def _cancelling(width: int, seed: int) -> Sublayer:
    """A Pre-LN sublayer whose F takes away what it is given, at this one x."""
    x = _gaussian(width, seed)[:1]
    branch = _Times(-float(x.std(correction=0)))
    return Sublayer(1, "feed-forward", branch, Residual("pre", Where(1, 1), width, eps=0).to(F64), x[None])


def _rows(sublayer: Sublayer, seed: int, where: str) -> Iterator[Case]:
    """The five rows of one column."""
    found, x = at_last_token(sublayer.step, sublayer.x)
    whole, width = jacobian(found, x), len(x)
    post = where.startswith("Post-LN")
    form, bare, norm = _post_form(sublayer) if post else _pre_form(sublayer)
    met = post or norm < 1

    def case(part: str, value: float, holds: bool, met: bool = True) -> Case:
        return Case(seed=seed, where=where, value=value, holds=holds, met=met, part=part)

    error = distance(form, whole)
    yield case("form", error, error <= ROUND_OFF)
    error = distance(_identity_path(sublayer), bare)
    yield case("identity", error, error <= ROUND_OFF)
    values = singular_values(whole)
    rank = numerical_rank(values, 1e-12)[0]
    yield case("rank", rank, rank <= width - 2 if post else rank == width, met)
    yield case("kernel", width - rank, width - rank >= 2 if post else rank == width, met)
    if post:
        with torch.no_grad():
            basis = left_kernel(found(x[None])[0], None, centred=True)[0]
        passed = float((whole.T @ basis).norm(dim=0).max()) / float(values[0])
        yield case("erased", passed, passed <= ROUND_OFF and bool((basis.norm(dim=0) > 0.5).all()))
    else:
        yield case("erased", float(values[-1]), bool(values[-1] > 1e-12 * values[0]), met)


def _post_form(sublayer: Sublayer) -> tuple[Tensor, Tensor, float]:
    """J_LN(z)(I + J_F), J_LN(z), and ‖J_F‖."""
    weight, eps = sublayer.norm("stream")
    of_branch = jacobian(*at_last_token(sublayer.apply, sublayer.x))
    with torch.no_grad():
        z = (sublayer.x + sublayer.apply(sublayer.x))[0, -1]
    of_norm = layer_norm_jacobian(z, weight, eps)
    eye = torch.eye(len(z), dtype=F64)
    return of_norm @ (eye + of_branch), of_norm, float(torch.linalg.matrix_norm(of_branch, 2))


def _pre_form(sublayer: Sublayer) -> tuple[Tensor, Tensor, float]:
    """I + J_F J_LN(x), I, and ‖A‖."""
    a = branch_jacobian(sublayer)
    eye = torch.eye(len(a), dtype=F64)
    return eye + a, eye, float(torch.linalg.matrix_norm(a, 2))


def _identity_path(sublayer: Sublayer) -> Tensor:
    """The Jacobian that is left where the branch lets no gradient back."""

    def step(x_BTD: Tensor, context: object) -> Tensor:
        return sublayer.residual(x_BTD, lambda u: sublayer.apply(u, context).detach())  # type: ignore[arg-type]

    return jacobian(*at_last_token(step, sublayer.x))
