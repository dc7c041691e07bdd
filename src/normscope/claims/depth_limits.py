"""How deep stacks train: Post-LN and Pre-LN, with residuals, without, and with gates in their place.

Shapes: B batch, T tokens, D width.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from normscope.claims.form import Case, Evidence, Figure, Kind, Line, Plot, Sentence, Setup, Source, claim
from normscope.claims.gradient_chain import log_gradients
from normscope.claims.training import (
    ABOVE,
    LEVELS,
    STEP,
    WARMUP,
    Outcome,
    Recipe,
    best,
    curve,
    effects,
    ladder,
    subjects,
    train_models,
    trained,
)
from normscope.claims.warmup import POST, POST_NORMAL, PRE_12, SLOWER, reaches, tally
from normscope.nn import Block
from normscope.nn.schemes.gates import HighwayGate
from normscope.subjects import Subject

THIN = Recipe(scheme="pre", depth=100, width=16, steps=140)
"""A hundred blocks; what is under the byte frequencies so early trains."""
NO_NORM = Recipe(scheme="residual-no-norm", depth=16)
PLAIN = Recipe(scheme="plain", depth=4)
LONGER = Recipe(scheme="post", depth=12, lr=5e-4, warmup=300, steps=1000)
WARM = replace(POST[2], warmup=WARMUP)
NORMAL = replace(POST_NORMAL[-1], depth=12, warmup=WARMUP)
CHAIN_WIDTH = 16
CHAIN = {"plain": 100, "residual-no-norm": 20, "post": 100, "pre": 1000, "highway": 100}
"""Blocks that a gradient is followed through, by scheme."""
FARTHER = 0.1
"""Nats: the smallest lag behind Pre-LN that counts as harder."""


@claim(
    "B5",
    Source("001", "§2.C", "例如超过 10 层或 20 层"),
    Source("001", "§2.C", "轻松训练上百层的模型"),
    Source("003", "§2", "可支撑 100+ 层深度"),
    Source("004", "§3.4", "训练深层模型（>12层）极难收敛"),
    Source("004", "§4.3 selection", "导致模型无法收敛"),
    Source("004", "§5.2.2", "早期的Transformer模型很少超过24层"),
    says="Beyond 10 to 20 layers Post-LN is very hard to train.",
    asks="Post-LN of 12 blocks (24 in the long form) does not end 0.1 nats under the byte frequencies at a "
    "seed's best setting: Xavier weights with and without warm-up, to 1e-3 or 3e-3, and N(0, 0.02²) with "
    "warm-up",
    kind=Kind.TENDENCY,
    parts={
        "xavier": "It does not from Xavier weights, the original ones, in 300 steps.",
        "longer": "From Xavier weights it does not in 1,000 steps with a warm-up of 300 to 5e-4, either.",
        "harder": Sentence(
            "At the same settings it ends 0.1 nats or more above Pre-LN, from Xavier weights.",
            smallest=FARTHER,
        ),
        "pre": Sentence("Pre-LN trains with a hundred layers.", smallest=0.0),
    },
    has_long=True,
)
def depth_of_post(setup: Setup) -> Evidence:
    """The best of the settings, by initialisation; Pre-LN at the same settings, and of a hundred blocks."""
    xavier, normal, cold, thin = [POST[2], WARM, replace(WARM, lr=SLOWER)], NORMAL, PRE_12, THIN
    if setup.long:
        deep = Recipe(scheme="post", depth=24, lr=SLOWER, warmup=300, steps=600)
        xavier, normal = [deep], replace(deep, init="normal")
        thin = replace(THIN, depth=128, steps=200)
    outcomes = trained(setup, [*xavier, normal, *([] if setup.long else [LONGER])])
    cases = []
    for part, recipes in (("", [*xavier, normal]), ("xavier", xavier), ("longer", [LONGER])):
        tried = {recipe: outcomes[recipe] for recipe in recipes if recipe in outcomes}
        for seed in setup.seeds if tried else ():
            recipe, found = best(tried, seed)
            case = Case(seed, str(recipe), found.excess, not found.trains, part)
            cases.append(case)
    pairs = [] if setup.long else [(POST[2], cold), (WARM, replace(cold, warmup=WARMUP))]
    for pair in pairs:
        cases += effects(setup, pair, lag, str(pair[0]), smallest=FARTHER, part="harder", replicas=1)
    cases += effects(setup, [thin], reaches, str(thin), smallest=0.0, part="pre", replicas=1)
    own = {case.seed: case.value for case in cases if not case.part and case.seed is not None}
    return Evidence(
        cases,
        Figure("deep Post-LN at its best ends above the byte frequencies by, in nats", own),
        plots=[
            Plot(
                "Post-LN of 12 blocks",
                STEP,
                ABOVE,
                [curve(str(recipe), by_seed) for recipe, by_seed in outcomes.items()],
                levels=LEVELS,
            )
        ],
        notes=tally(outcomes),
        unmeasured=[f"100 blocks: {thin.steps} steps at d = {thin.width} and not 300 at d = 32"],
        of="seeds",
    )


def lag(outcomes: Sequence[Outcome]) -> float:
    """Nats by which the first of two ends above the second."""
    return outcomes[0].final - outcomes[1].final


@claim(
    "C2",
    Source("004", "§4.3 table", "通常 < 20层"),
    Source("004", "§4.3 table", "100层 ~ 1000层+"),
    Source("004", "§4.3 table", "线性衰减或常数级"),
    Source("004", "§8.2", "从几十层到上百层甚至上千层"),
    Source("004", "§10", "训练超过100层甚至1000层的网络成为可能"),
    says="With residual connections stacks of 100 to 1000 layers train.",
    asks="at the start the gradient changes by no more than a factor of the number of blocks, through 20 "
    "blocks with residuals and no norm, 100 of Post-LN and 1000 of Pre-LN; trained, 16 blocks of the first, "
    "12 of Post-LN from two kinds of weights and 100 of Pre-LN end 0.1 nats under the byte frequencies",
    kind=Kind.TENDENCY,
    parts={
        "pre": "With residual connections and norms before the branches (Pre-LN) they do.",
        "limit": "Without residuals a gradient loses three decades within 20 layers.",
        "exponential": "Without residuals the gradient decays exponentially in depth.",
        "shallow": "Without residuals, a few layers (four) still train, at 1e-3 or 3e-3.",
    },
    has_long=True,
)
def residuals_carry_depth(setup: Setup) -> Evidence:
    """Gradients at the start through up to 1000 blocks, and short trainings."""
    chains = {
        name: {seed: log_gradients(name, CHAIN[name], CHAIN_WIDTH, seed) for seed in setup.seeds}
        for name in CHAIN
    }
    deep, plain = [NO_NORM, WARM, NORMAL, THIN], ladder(PLAIN, (1e-3, 3e-3))
    if setup.long:
        deep = [replace(THIN, steps=300), replace(NO_NORM, lr=1e-3, depth=32)]
    outcomes = trained(setup, [*deep, *plain])
    cases = [
        case
        for name, by_seed in chains.items()
        for seed, logs in by_seed.items()
        for case in _chain_cases(name, seed, logs)
    ]
    for recipe in deep:
        for seed, found in outcomes[recipe].items():
            for part in ("", "pre") if recipe.scheme == "pre" else ("",):
                case = Case(seed, str(recipe), found.excess, found.trains, part)
                cases.append(case)
    for seed in setup.seeds:
        recipe, found = best({recipe: outcomes[recipe] for recipe in plain}, seed)
        where, holds = str(recipe), found.trains
        cases.append(Case(seed, where, found.excess, holds, "shallow"))
    return Evidence(
        cases,
        Figure(
            "decades that a gradient loses through 20 blocks without residuals",
            {seed: -logs[20] for seed, logs in chains["plain"].items()},
        ),
        plots=[_chain_plot({name: list(by_seed.values()) for name, by_seed in chains.items()})],
        notes=tally({recipe: outcomes[recipe] for recipe in deep}),
        of="stacks",
    )


def _chain_cases(name: str, seed: int, logs: Sequence[float]) -> Iterator[Case]:
    where = f"{name}, gradient through {len(logs) - 1} blocks, decades"
    if name == "plain":
        fit = statistics.correlation(range(len(logs)), logs)
        yield Case(seed, where, logs[20], logs[20] <= -3, "limit")
        where = f"{name}, correlation of log gradient and depth"
        yield Case(seed, where, fit, fit <= -0.98, "exponential")
    elif name != "highway":
        holds = 10 ** min(abs(logs[-1]), 300) <= len(logs) - 1
        for part in ("", "pre") if name == "pre" else ("",):
            yield Case(seed, where, logs[-1], holds, part)


def _chain_plot(chains: dict[str, list[list[float]]]) -> Plot:
    return Plot(
        "The gradient on its way down, at the start",
        "blocks below the top",
        "log10 of its size there over that at the top",
        [
            Line.over_seeds(
                name,
                {
                    below: [logs[below] for logs in by_seed]
                    for below in range(1, 101)
                    if below < len(by_seed[0])
                },
            )
            for name, by_seed in chains.items()
        ],
        log="x",
    )


HIGHWAY = Recipe(scheme="highway", depth=8, steps=100)


@dataclass(frozen=True)
class Gates:
    """Of one model: the mean of t, and the RMS gradient of the lowest gate's weights over the highest's."""

    mean: float
    bottom_to_top: float


BIASES, HELD_OUT_BIASES = (0.0, -2.0, -4.0), (-1.0, -3.0)
"""Gate biases: those of the paper (Srivastava et al. 2015) are -1 to -4."""
LOST = 3.0
"""Decades."""
OPEN = math.log(10 ** (LOST / (2 * CHAIN["highway"])) - 1)
"""A gate passes on 1 − σ(b) of the stream: from this bias on 200 gates lose three decades."""


@claim(
    "C3",
    Source("004", "§8.2", "门控机制本身也面临着梯度消失的风险，且引入了额外的参数量"),
    says="In very deep Highway networks the gradient vanishes through the gates themselves.",
    asks="at the start the gradient through 100 blocks falls by more than three decades, with the gates' "
    "bias from 0 to -4, where that of a residual stack with Pre-LN does not",
    condition=f"the gates' bias is above {OPEN:.1f}, where (1 − σ(bias))²⁰⁰ is under 1e-3",
    parts={
        "residual": "A residual stack with Pre-LN loses no decade over the same depth.",
        "trained": "Training 8 blocks for 100 steps closes the gates: their mean falls.",
        "parameters": "The gates cost parameters: more than 1 % of the blocks'.",
    },
)
def gates_vanish(setup: Setup) -> Evidence:
    """Gradient through 100 gated blocks by bias, the gates before and after training, parameters."""
    cases, depth = [], CHAIN["highway"]
    for seed in setup.seeds:
        for bias in setup.sizes(BIASES, HELD_OUT_BIASES):
            lost = -log_gradients("highway", depth, CHAIN_WIDTH, seed, gate_bias=bias)[-1]
            where, met = f"bias {bias:g}, decades lost through {depth} blocks", bias > OPEN
            cases.append(Case(seed, where, lost, lost > LOST, met=met))
    evidence = Evidence(cases, Figure.largest("most decades lost through 100 gated blocks", cases))
    return evidence if setup.fresh else _with_parts(setup, evidence, depth)


def _with_parts(setup: Setup, evidence: Evidence, depth: int) -> Evidence:
    """The cases of the parts, which have no condition to confirm."""
    cases = list(evidence.cases)
    before, after, extra = _gates(setup)
    for seed in setup.seeds:
        lost = -log_gradients("pre", depth, CHAIN_WIDTH, seed)[-1]
        where = f"pre, decades lost through {depth} blocks"
        cases.append(Case(seed, where, lost, abs(lost) < 1, "residual"))
        fell = before[seed].mean - after[seed].mean
        where = f"mean of t from {before[seed].mean:.3f} to {after[seed].mean:.3f}"
        cases.append(Case(seed, where, fell, fell > 0, "trained"))
    where = f"{HIGHWAY.width} wide, share of a block's parameters"
    cases.append(Case(None, where, extra, extra > 0.01, "parameters"))
    notes = [f"Gates add {extra:.1%} to the parameters of a block of width {HIGHWAY.width}."]
    return replace(evidence, cases=cases, notes=notes)


def _gates(setup: Setup) -> tuple[dict[int, Gates], dict[int, Gates], float]:
    """The gates of each seed's model before and after training, and their share of a block's parameters."""
    models = subjects(setup, HIGHWAY)
    before = {seed: _look_at_gates(subject) for seed, subject in models.items()}
    train_models(models, HIGHWAY)
    after = {seed: _look_at_gates(subject) for seed, subject in models.items()}
    modules = list(next(iter(models.values())).model.modules())
    gates = sum(_size(module) for module in modules if isinstance(module, HighwayGate))
    blocks = sum(_size(module) for module in modules if isinstance(module, Block))
    return before, after, gates / (blocks - gates)


def _look_at_gates(subject: Subject) -> Gates:
    """Of the model as it is, on the subject's fixed batch."""
    gates = [module for module in subject.model.modules() if isinstance(module, HighwayGate)]
    means: list[float] = []
    hooks = [
        gate.transform.register_forward_hook(lambda _, __, out: means.append(out.sigmoid().mean().item()))
        for gate in gates
    ]
    weights = [gate.transform.weight for gate in gates]
    try:
        gradients = torch.autograd.grad(subject.loss(), weights)
    finally:
        for hook in hooks:
            hook.remove()
    return Gates(statistics.fmean(means), float(gradients[0].norm() / gradients[-1].norm()))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
