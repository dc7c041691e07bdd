"""How deep stacks train: Post-LN and Pre-LN, with residuals, without, and with gates in their place.

Shapes: B batch, T tokens, D width.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from normscope.claims.claim import Kind, Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.gradient_chain import log_gradients
from normscope.claims.plots import Line, Plot
from normscope.claims.setup import Setup
from normscope.claims.sources import Source
from normscope.claims.training import (
    ABOVE,
    LEVELS,
    WARMUP,
    Recipe,
    best,
    ladder,
    subjects,
    train_models,
    trained,
)
from normscope.claims.warmup import POST, POST_NORMAL, PRE, SLOWER
from normscope.nn import Block
from normscope.nn.schemes.gates import HighwayGate
from normscope.subjects import Subject

LIMIT = 10
"""Blocks beyond which 001 and 004 see trouble: 10 or 20, 12, 24."""
THIN = Recipe(scheme="pre", depth=100, width=16, steps=140)
"""A hundred blocks; what is under the byte frequencies so early trains."""
NO_NORM = Recipe(scheme="residual-no-norm", depth=16)
PLAIN = Recipe(scheme="plain", depth=4)
CHAIN_WIDTH = 16
CHAIN = {"plain": 100, "residual-no-norm": 20, "post": 100, "pre": 1000, "highway": 100}
"""Blocks that a gradient is followed through, by scheme."""


@claim(
    "B5",
    Source("001", "§2.C", "例如超过 10 层或 20 层"),
    Source("001", "§2.C", "轻松训练上百层的模型"),
    Source("003", "§2", "可支撑 100+ 层深度"),
    Source("004", "§3.4", "训练深层模型（>12层）极难收敛"),
    Source("004", "§4.3 selection", "导致模型无法收敛"),
    Source("004", "§5.2.2", "早期的Transformer模型很少超过24层"),
    says="Beyond 10 to 20 layers Post-LN is very hard to train.",
    asks="Post-LN of 12 blocks, from Xavier weights (with and without warm-up, to 1e-3 or 3e-3) and "
    "from N(0, 0.02²) (with warm-up), does not end 0.1 nats under the byte frequencies at a seed's best "
    "setting",
    condition="the weights are Xavier's",
    kind=Kind.TENDENCY,
    parts={
        "shallow": Sentence("Up to 10 layers Post-LN trains."),
        "pre": Sentence("Pre-LN trains with a hundred layers."),
    },
    has_long=True,
)
def depth_of_post(setup: Setup) -> Evidence:
    """The best of each depth's settings, by placement and initialisation."""
    settings = _settings(setup.long)
    outcomes = trained(setup, [recipe for recipes in settings.values() for recipe in recipes])
    found = {
        name: {seed: best({r: outcomes[r] for r in recipes}, seed) for seed in setup.seeds}
        for name, recipes in settings.items()
    }
    cases = []
    for (kind, depth), by_seed in found.items():
        part = "pre" if kind == "pre" else "shallow" if depth <= LIMIT else ""
        for seed, (recipe, outcome) in by_seed.items():
            holds = outcome.trains == bool(part)
            met = kind != "post, normal"
            cases.append(
                Case(seed=seed, where=str(recipe), value=outcome.excess, holds=holds, met=met, part=part)
            )
    deepest = max(depth for kind, depth in found if kind == "post")
    return Evidence(
        cases=cases,
        figure=Figure(
            f"Post-LN of {deepest} blocks at its best ends above the byte frequencies by, in nats",
            {seed: outcome.excess for seed, (_, outcome) in found["post", deepest].items()},
        ),
        plots=[
            Plot(
                "The best setting of each depth",
                "blocks",
                ABOVE,
                [
                    Line.over_seeds(
                        kind,
                        {
                            depth: [outcome.excess for _, outcome in by_seed.values()]
                            for (other, depth), by_seed in found.items()
                            if other == kind
                        },
                    )
                    for kind in dict.fromkeys(kind for kind, _ in found)
                ],
                log="x",
                levels=LEVELS,
            )
        ],
        notes=[
            f"{kind}, {depth} blocks: {sum(o.trains for _, o in by_seed.values())} of {len(by_seed)} train."
            for (kind, depth), by_seed in found.items()
        ],
        unmeasured=[]
        if setup.long
        else [f"100 blocks: {THIN.steps} steps at d = {THIN.width} and not 300 at d = 32"],
        of="depths and seeds",
    )


def _settings(long: bool) -> dict[tuple[str, int], list[Recipe]]:
    """The runs of each kind and depth."""
    if long:
        deep = Recipe(scheme="post", depth=24, lr=SLOWER, warmup=300, steps=600)
        return {
            ("post", 24): [deep],
            ("post, normal", 24): [replace(deep, init="normal")],
            ("pre", 128): [replace(THIN, depth=128, steps=200)],
        }
    warm = {recipe.depth: replace(recipe, warmup=WARMUP) for recipe in POST}
    slower = {depth: replace(recipe, lr=SLOWER) for depth, recipe in warm.items()}
    return {
        ("post", 4): [POST[0], warm[4]],
        ("post", 8): [POST[1], warm[8], slower[8]],
        ("post", 12): [POST[2], warm[12], slower[12]],
        ("post, normal", 12): [replace(POST_NORMAL[-1], depth=12, warmup=WARMUP)],
        ("pre", 8): [PRE[1]],
        ("pre", 16): [PRE[2]],
        ("pre", THIN.depth): [THIN],
    }


@claim(
    "C2",
    Source("004", "§4.3 table", "通常 < 20层"),
    Source("004", "§4.3 table", "100层 ~ 1000层+"),
    Source("004", "§4.3 table", "线性衰减或常数级"),
    Source("004", "§8.2", "从几十层到上百层甚至上千层"),
    Source("004", "§10", "训练超过100层甚至1000层的网络成为可能"),
    says="With residual connections stacks of 100 to 1000 layers train.",
    asks="at the start the gradient changes by no more than a factor of the number of blocks, through "
    "20 blocks with residuals and no norm, 100 of Post-LN and 1000 of Pre-LN; trained, 16 blocks of the "
    "first, 12 of Post-LN and 100 of Pre-LN end 0.1 nats under the byte frequencies",
    condition="the norm is before the branch (Pre-LN)",
    kind=Kind.TENDENCY,
    parts={
        "limit": Sentence("Without residuals a gradient loses three decades within 20 layers."),
        "exponential": Sentence("Without residuals the gradient decays exponentially in depth."),
        "shallow": Sentence("Without residuals, a few layers (four) still train."),
    },
    has_long=True,
)
def residuals_carry_depth(setup: Setup) -> Evidence:
    """Gradients at the start through up to 1000 blocks, and short trainings."""
    chains = {(name, seed): _chain(name, seed) for name in CHAIN for seed in setup.seeds}
    deep, plain = _trained_deep(setup.long), ladder(PLAIN, (1e-3, 3e-3))
    outcomes = trained(setup, [*deep, *plain])
    cases = [case for (name, seed), logs in chains.items() for case in _chain_cases(name, seed, logs)]
    for recipe in deep:
        for seed, outcome in outcomes[recipe].items():
            met = recipe.scheme == "pre"
            cases.append(
                Case(seed=seed, where=str(recipe), value=outcome.excess, holds=outcome.trains, met=met)
            )
    for seed in setup.seeds:
        recipe, outcome = best({recipe: outcomes[recipe] for recipe in plain}, seed)
        cases.append(
            Case(seed=seed, where=str(recipe), value=outcome.excess, holds=outcome.trains, part="shallow")
        )
    return Evidence(
        cases=cases,
        figure=Figure(
            "decades that a gradient loses through 20 blocks without residuals",
            {seed: -chains["plain", seed][20] for seed in setup.seeds},
        ),
        plots=[_chain_plot({name: [chains[name, seed] for seed in setup.seeds] for name in CHAIN})],
        notes=[
            f"Through {len(logs) - 1} blocks of {name} the gradient changes by {logs[-1]:+.2f} decades "
            f"(seed {seed})."
            for (name, seed), logs in chains.items()
            if seed == setup.seeds[0]
        ],
        of="stacks",
    )


def _trained_deep(long: bool) -> list[Recipe]:
    if long:
        return [replace(THIN, steps=300), replace(NO_NORM, lr=1e-3, depth=32)]
    return [NO_NORM, replace(NO_NORM, lr=1e-3), replace(POST[2], warmup=WARMUP), THIN]


def _chain(name: str, seed: int) -> list[float]:
    """log10 of the gradient l blocks below the top over that at the top, by l."""
    return log_gradients(name, CHAIN[name], CHAIN_WIDTH, seed)


def _chain_cases(name: str, seed: int, logs: Sequence[float]) -> Iterator[Case]:
    where = f"{name}, gradient through {len(logs) - 1} blocks, decades"
    if name == "plain":
        yield Case(seed=seed, where=where, value=logs[20], holds=logs[20] <= -3, part="limit")
        fit = statistics.correlation(range(len(logs)), logs)
        yield Case(
            seed=seed,
            where=f"{name}, correlation of log gradient and depth",
            value=fit,
            holds=fit <= -0.98,
            part="exponential",
        )
    elif name != "highway":
        change = abs(logs[-1])
        holds = 10 ** min(change, 300) <= len(logs) - 1
        yield Case(seed=seed, where=where, value=logs[-1], holds=holds, met=name == "pre")


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


@claim(
    "C3",
    Source("004", "§8.2", "门控机制本身也面临着梯度消失的风险，且引入了额外的参数量"),
    says="In very deep Highway networks the gradient vanishes through the gates themselves.",
    asks="at the start the gradient through 100 blocks falls by more than three decades, with the "
    "gate's bias at -2 as built, where that of a residual stack with Pre-LN does not",
    kind=Kind.TENDENCY,
    parts={
        "residual": Sentence("A residual stack with Pre-LN loses no decade over the same depth."),
        "trained": Sentence("Training 8 blocks for 100 steps closes the gates: their mean falls."),
        "parameters": Sentence("The gates cost parameters: more than 1 % of the blocks'."),
    },
)
def gates_vanish(setup: Setup) -> Evidence:
    """Gradient through 100 gated blocks, the gates before and after training, parameters."""
    cases = []
    for seed in setup.seeds:
        for name, part in (("highway", ""), ("pre", "residual")):
            lost = -log_gradients(name, CHAIN["highway"], CHAIN_WIDTH, seed)[-1]
            where = f"{name}, decades lost through {CHAIN['highway']} blocks"
            holds = lost > 3 if name == "highway" else abs(lost) < 1
            cases.append(Case(seed=seed, where=where, value=lost, holds=holds, part=part))
    before, after, extra = _gates(setup)
    for seed in setup.seeds:
        fell = before[seed].mean - after[seed].mean
        where = f"mean of t from {before[seed].mean:.3f} to {after[seed].mean:.3f}"
        cases.append(Case(seed=seed, where=where, value=fell, holds=fell > 0, part="trained"))
        where = f"{HIGHWAY.width} wide, share of a block's parameters"
        cases.append(Case(seed=seed, where=where, value=extra, holds=extra > 0.01, part="parameters"))
    ratios = [gates.bottom_to_top for gates in before.values()], [g.bottom_to_top for g in after.values()]
    return Evidence(
        cases=cases,
        figure=Figure.largest("decades that a gradient loses through 100 gated blocks", cases),
        notes=[
            f"Gates add {extra:.1%} to the parameters of a block of width {HIGHWAY.width}.",
            f"The lowest gate's gradient is {statistics.median(ratios[0]):.2g} of the highest's at the start "
            f"of 8 blocks, {statistics.median(ratios[1]):.2g} after {HIGHWAY.steps} steps.",
        ],
        of="stacks",
    )


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
