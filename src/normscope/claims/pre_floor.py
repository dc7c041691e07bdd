"""Pre-LN's floor in real blocks: how often ‖A‖ < 1, and what it is worth.

Shapes: B batch, T tokens, D width.
"""

import itertools
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from normscope.claims.form import Case, Evidence, Figure, Line, Plot, Sentence, Setup, Source, claim
from normscope.claims.norm_jacobian import ROUND_OFF
from normscope.claims.real_blocks import (
    F64,
    INITS,
    Sublayer,
    at_last_token,
    branch_jacobian,
    jacobian,
    started,
    sublayers,
)
from normscope.claims.short_runs import small, train_changed
from normscope.linalg import JacobianOperator, numerical_rank, sigma_max, singular_values, weyl_lower_bound
from normscope.nn import Decoder
from normscope.train import RunConfig

SIZES = {32: (1, 4, 16, 64), 128: (1, 8), 256: (1,)}
"""Width → depths."""
TOKENS = 16
KINDS = ("attention", "feed-forward", "both")


@claim(
    "A11",
    Source("000", "Theorem 4.6", "Pre-LN 的梯度下界"),
    Source("000", "(35)–(38)"),
    Source("000", "§7", "梯度在所有方向上均有正下界"),
    says="A Pre-LN layer's Jacobian I + A has full rank, with σ_min ≥ 1 − ‖A‖ > 0.",
    hypothesis="‖A‖ < 1",
    asks="0 < 1 − ‖A‖ ≤ σ_min at the last of 16 tokens: attention, feed-forward and both, in the "
    "first, middle and last block of Pre-LN decoders at their start, 1 to 64 blocks, widths 32 to 256, four "
    "initialisations",
    parts={
        "sequence": "The hypothesis ‖A‖ < 1 is met by the map of the whole sequence.",
        "trained": Sentence("The same at one token after 100 steps of training.", hypothesis="‖A‖ < 1"),
        "needed": "The hypothesis is needed: where ‖A‖ ≥ 1 the Jacobian loses a direction.",
    },
)
def pre_ln_floor(setup: Setup) -> Evidence:
    """‖A‖ and σ_min(I + A) of real blocks: the bound, and how often it says anything."""
    cases = setup.cases(_floor_cases)
    cases += list(_trained_cases(setup))
    of = {
        part: [case for case in cases if case.part == part] for part in ("", "sequence", "trained", "needed")
    }
    token = of[""]
    by_kind = ", ".join(f"{kind} {_met(token, kind=kind):.0%}" for kind in KINDS)
    by_init = ", ".join(f"{words} {_met(token, init=words):.0%}" for words in INITS.values())
    return Evidence(
        cases,
        Figure(
            "Pre-LN branches and blocks with ‖A‖ < 1, in %",
            {seed: 100 * _met([case for case in token if case.seed == seed]) for seed in setup.seeds},
        ),
        plots=[
            _plot(
                "‖A‖ of whole Pre-LN blocks, d = 32",
                "blocks",
                "depth",
                [c for c in token if c.at["width"] == 32],
            ),
            _plot(
                "‖A‖ of a single block by width", "width", "width", [c for c in token if c.at["depth"] == 1]
            ),
        ],
        notes=[
            f"‖A‖ < 1 by branch: {by_kind}.",
            f"By initialisation: {by_init}.",
            f"Of the whole sequence's maps {_held(of['sequence']):.0%} have ‖A‖ < 1; after 100 steps of "
            f"training {_met(of['trained']):.0%} of those at one token.",
            f"Of {len(of['needed'])} Jacobians with ‖A‖ ≥ 1, {1 - _held(of['needed']):.0%} have full rank.",
        ],
        of="maps: four initialisations × widths 32, 128, 256 × depths 1 to 64",
        parts_of={"trained": "maps: two initialisations × blocks 1, 3, 6, after training"},
    )


def _floor_cases(seed: int) -> Iterator[Case]:
    for init, words in INITS.items():
        for width, depth in ((width, depth) for width, depths in SIZES.items() for depth in depths):
            model, ids = started("pre", init=init, depth=depth, width=width, seed=seed, tokens=TOKENS)
            found = sublayers(model, ids)
            for block in sorted({1, (depth + 1) // 2, depth}):
                pair = found[2 * block - 2 : 2 * block]
                where = f"{words}, d = {width}, block {block} of {depth}"
                yield from _block_cases(pair, seed, where, {"init": words, "width": width, "depth": depth})
                if width < 256:
                    yield _sequence_case(pair, seed, where)


def _block_cases(
    pair: list[Sublayer], seed: int, where: str, at: Mapping[str, float | str], part: str = ""
) -> Iterator[Case]:
    """Attention, feed-forward and both: ‖A‖ by the closed form, σ_min by autograd of the whole step."""
    branches = [branch_jacobian(each) for each in pair]
    eye = torch.eye(len(branches[0]), dtype=F64)
    both = (eye + branches[1]) @ (eye + branches[0]) - eye
    steps = [jacobian(*at_last_token(each.step, each.x)) for each in pair]
    for kind, a, j in zip(KINDS, (*branches, both), (*steps, steps[1] @ steps[0]), strict=True):
        norm = float(torch.linalg.matrix_norm(a, 2))
        values = singular_values(j)
        bound, within = weyl_lower_bound(norm), norm < 1
        case = Case(
            seed,
            f"{where}, {kind}",
            norm,
            bool(within and values[-1] >= bound - ROUND_OFF),
            part,
            at={**at, "kind": kind},
            within=within,
        )
        yield case
        if not within and not part:
            lost = numerical_rank(values, 1e-12)[0] < len(values)
            yield replace(case, value=float(values[-1]), holds=lost, within=True, part="needed")


def _sequence_case(pair: list[Sublayer], seed: int, where: str) -> Case:
    """The larger of ‖A‖ of the attention's and of the feed-forward's map of all tokens, to 5 %."""

    def norm(sublayer: Sublayer) -> float:
        branch = JacobianOperator(lambda x: sublayer.step(x) - x, sublayer.x)
        return sigma_max(branch, tol=0.05).value

    value = max(norm(each) for each in pair)
    return Case(seed, where, value, value < 1, "sequence")


def _trained_cases(setup: Setup) -> Iterator[Case]:
    for init in ("xavier", "gpt2"):
        config = small("pre", init=init, steps=100)
        for seed, run in train_changed(setup, config).items():
            decoder = run.model.to(F64).eval().requires_grad_(False)
            assert isinstance(decoder, Decoder)
            found = sublayers(decoder, _next_ids(config.replace(seed=seed), setup)[:1, :TOKENS])
            for block in (1, 3, 6):
                where = f"{INITS[init]}, d = 32, block {block} of 6, 100 steps"
                yield from _block_cases(found[2 * block - 2 : 2 * block], seed, where, {}, "trained")


def _next_ids(config: RunConfig, setup: Setup) -> Tensor:
    """The first batch (B, T) that a run has not seen."""
    subject = config.replace(text=setup.text and str(setup.text)).subject()
    batch = next(itertools.islice(subject.batches(), config.trial.steps, None))
    assert isinstance(batch, dict)
    return batch["ids"]


def _met(cases: list[Case], **at: str) -> float:
    """Share of the cases at `at` that meet the hypothesis."""
    chosen = [case.within for case in cases if at.items() <= case.at.items()]
    return sum(chosen) / len(chosen) if chosen else 0.0


def _held(cases: list[Case]) -> float:
    return sum(case.holds for case in cases) / len(cases)


def _plot(title: str, x: str, key: str, cases: list[Case]) -> Plot:
    """Median ‖A‖ of whole blocks by `key`, a line an initialisation."""
    points: dict[str, dict[float, dict[int | None, list[float]]]] = {}
    for case in cases:
        if case.at["kind"] == "both":
            by_seed = points.setdefault(str(case.at["init"]), {}).setdefault(float(case.at[key]), {})
            by_seed.setdefault(case.seed, []).append(case.value)
    lines = [
        Line.over_seeds(
            words, {at: [*map(statistics.median, by_seed.values())] for at, by_seed in by.items()}
        )
        for words, by in points.items()
    ]
    return Plot(title, x, "median ‖A‖", lines, "xy", {"‖A‖ = 1": 1.0})
