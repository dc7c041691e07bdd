"""A learnt gate or factor on the branch, against the same stack without it, early in training."""

import statistics
from dataclasses import replace

import torch

from normscope.claims.claim import Kind, Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.plots import Plot
from normscope.claims.setup import Setup
from normscope.claims.sources import Source
from normscope.claims.training import ABOVE, LEVELS, STEP, Outcome, Recipe, curve, trained
from normscope.claims.warmup import POST, PRE
from normscope.nn import Block, ModelConfig
from normscope.nn.placement import Where

EARLY = 100
"""Steps that are called early."""
DEPTH, DEEP = 8, 16
"""Blocks, in the short form and in the long one."""
NO_NORM = Recipe(scheme="residual-no-norm", depth=DEPTH, steps=EARLY)
GATED = {
    "rezero": NO_NORM,
    "highway": NO_NORM,
    "layerscale": PRE[1],
    "gtrxl": PRE[1],
}
"""Each gated scheme with the same stack without a gate."""
FACTORS = ("rezero", "layerscale")
"""Those that are a learnt number on the branch; the others compute a gate from what they are given."""


@claim(
    "C29",
    Source("004", "§11.2", "**加权或门控残差连接**"),
    Source("004", "§11.2", "在训练初期保留更多原始信息"),
    says="A learnt factor or gate on the branch helps early in training.",
    asks="8 blocks (16 in the long form), AdamW 3e-3, no warm-up: after 100 steps the mean of 20 "
    "losses is lower with the gate (ReZero, Highway; LayerScale, GTrXL) than in the same stack without (no "
    "norms; Pre-LN)",
    condition="it is a learnt factor (ReZero, LayerScale) and not a gate that reads its input",
    kind=Kind.TENDENCY,
    has_long=True,
    parts={
        "keeps": Sentence(
            "At the start a block with the gate passes on more of its input.",
            "it stands in for an ungated stack without norms (ReZero, Highway)",
        ),
        "post": Sentence("Each of them is ahead of Post-LN after 100 steps."),
    },
)
def gates_help_early(setup: Setup) -> Evidence:
    """The loss after 100 steps, and what a block does to its input at the start."""
    depth = DEEP if setup.long else DEPTH
    recipes = {name: replace(NO_NORM, scheme=name, depth=depth) for name in GATED}
    plain = {name: replace(recipe, depth=depth) for name, recipe in GATED.items()}
    post = replace(POST[1], depth=depth)
    outcomes = trained(setup, [*recipes.values(), *plain.values(), post])
    cases = []
    for name, recipe in recipes.items():
        ungated = plain[name]
        for seed in setup.seeds:
            ends = [after(outcomes[r][seed]) for r in (recipe, ungated, post)]
            met = name in FACTORS
            where = f"{name} {ends[0]:+.2f} nats, {ungated.scheme} {ends[1]:+.2f}"
            cases.append(
                Case(seed=seed, where=where, value=ends[0] - ends[1], holds=ends[0] < ends[1], met=met)
            )
            where = f"{name} {ends[0]:+.2f} nats, post {ends[2]:+.2f}"
            cases.append(
                Case(seed=seed, where=where, value=ends[0] - ends[2], holds=ends[0] < ends[2], part="post")
            )
            moves = [change(scheme, depth, seed) for scheme in (name, ungated.scheme)]
            where = f"a block changes its input by {moves[0]:.2g} ({name}), {moves[1]:.2g} ({ungated.scheme})"
            cases.append(
                Case(
                    seed=seed,
                    where=where,
                    value=moves[0],
                    holds=moves[0] < moves[1],
                    met=ungated.scheme == NO_NORM.scheme,
                    part="keeps",
                )
            )
    ahead = {
        seed: statistics.fmean(c.value for c in cases if c.seed == seed and not c.part and c.met)
        for seed in setup.seeds
    }
    return Evidence(
        cases=cases,
        figure=Figure("nats above the stack without after 100 steps, mean of the learnt factors", ahead),
        plots=[
            Plot(
                f"{depth} blocks, the first {EARLY} steps",
                STEP,
                ABOVE,
                [
                    curve(recipe.scheme, {s: _early(o) for s, o in outcomes[recipe].items()}, every=5)
                    for recipe in outcomes
                ],
                levels=LEVELS,
            )
        ],
        notes=[
            f"{recipe.scheme}: {statistics.median(after(o) for o in by_seed.values()):+.2f} nats from the "
            f"byte frequencies after {EARLY} steps, the median."
            for recipe, by_seed in outcomes.items()
        ],
        of="stacks",
    )


def _early(outcome: Outcome) -> Outcome:
    return replace(outcome, losses=outcome.losses[:EARLY])


def after(outcome: Outcome) -> float:
    """Nats above the byte frequencies after the first 100 steps."""
    return _early(outcome).excess


@torch.no_grad()
def change(scheme: str, depth: int, seed: int) -> float:
    """‖block(x) − x‖/‖x‖ of the first of `depth` blocks at the start, x standard normal (4, 32, 32)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        block = Block(
            ModelConfig(scheme=scheme, depth=depth, width=32, heads=2), Where(1, depth), causal=True
        )
        x_BTD = torch.randn(4, 32, 32)
    state = block(x_BTD)
    assert isinstance(state, torch.Tensor), "one stream"
    return float((state - x_BTD).norm() / x_BTD.norm())
