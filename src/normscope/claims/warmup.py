"""Warm-up and clipping for Post-LN, and how its runs fail."""

from collections.abc import Iterator
from dataclasses import replace

from normscope.claims import training
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, effect, flat
from normscope.claims.measure import NotMeasured
from normscope.claims.training import WARMUP, Outcome, Setting
from normscope.train import MARGIN

POST = tuple(Setting(scheme="post", depth=depth) for depth in (4, 8, 12))
POST_NORMAL = tuple(Setting(scheme="post", init="normal", depth=depth) for depth in (4, 8))
PRE = tuple(Setting(scheme="pre", depth=depth) for depth in (4, 8, 16, 12))
SLOWER = 1e-3
CLIP = 1.0
"""The threshold that 004 advises."""


@claim("B4", has_long=True)
def needs_warmup(setup: Setup) -> Evidence:
    """With and without warm-up: Post-LN from two kinds of weights, Pre-LN."""
    post, deep, pre, warmup = (*POST, *POST_NORMAL, replace(POST[1], lr=SLOWER)), POST[1:], PRE, WARMUP
    if setup.long:
        long = Setting(scheme="post", depth=10, steps=1000)
        post, deep = (long, replace(long, init="normal")), (long,)
        pre, warmup = (replace(long, scheme="pre"),), 500
    outcomes = training.trained(setup, [*post, *pre])
    cases = [
        Case(seed, str(setting), outcome.excess, not outcome.trains)
        for setting in post
        for seed, outcome in outcomes[setting].items()
    ]
    cases += training.effects(setup, deep[-1:], training.misses, part="deep")
    warm = [replace(setting, warmup=warmup) for setting in deep]
    for setting in warm:
        twice = 1 + (setting is warm[0])  # the outcome of 8 blocks hangs on rounding, that of 12 does not
        cases += training.effects(setup, [setting], training.reaches, part="cure", replicas=twice)
    for setting in pre:
        cases += training.effects(setup, [setting], training.reaches, part="pre")
    cold = pre[-1]
    pair = [replace(cold, warmup=warmup), cold]
    cases += training.effects(setup, pair, training.lead, str(cold), part="short")
    shown = training.trained(setup, [deep[0], warm[0], post[-2], cold])
    depth, above = deep[-1].depth, {seed: outcome.excess for seed, outcome in outcomes[deep[-1]].items()}
    return Evidence(
        cases,
        Figure(
            f"Post-LN of {depth} blocks without warm-up ends above the byte frequencies by, in nats", above
        ),
        plots=[training.curves("Post-LN and Pre-LN with and without warm-up", shown)],
        notes=training.tally(outcomes | training.trained(setup, warm)),
    )


SGD = tuple(Setting(scheme="post", depth=8, optimizer="sgd", lr=lr) for lr in (0.1, 1.0))


@claim("B17")
def fails_by_divergence(setup: Setup) -> Evidence:
    """The ends of the runs of Post-LN without warm-up that fail."""
    outcomes = training.trained(setup, [*POST, *training.ladder(POST[0]), *SGD])
    failing = [each for each in flat(outcomes) if not each[-1].trains]
    cases = [case for each in failing for case in _ends(*each)]
    if not any(case.part == "adamw" for case in cases):
        raise NotMeasured("every Post-LN run without warm-up trains under AdamW")
    return Evidence(
        cases,
        Figure.largest("farthest from the byte frequencies under AdamW, in nats", cases, "adamw"),
        plots=[training.curves("Post-LN without warm-up", outcomes, most=1.0)],
        notes=training.tally(outcomes),
    )


def _ends(setting: Setting, seed: int, outcome: Outcome) -> Iterator[Case]:
    where, value, flew = str(setting), outcome.excess, not outcome.final <= outcome.losses[0]
    yield Case(seed, where, value, flew)
    if setting.optimizer == "adamw":
        yield Case(seed, where, abs(value), abs(value) <= MARGIN, "adamw")
        yield Case.at_least(seed, where, max(outcome.losses) / outcome.losses[0], 1.1, "spike")
    elif setting.lr >= 1:
        yield Case(seed, where, value, flew, "sgd")


UNSTABLE = tuple(Setting(scheme="residual-no-norm", depth=6, optimizer="sgd", lr=lr) for lr in (0.1, 0.3))
"""Runs without norms that overflow; 6 blocks were not looked at when the part was written."""


@claim("C26", has_long=True)
def clipping_rescues(setup: Setup) -> Evidence:
    """The same runs with and without clipping, under both optimisers."""
    adamw = [POST[1], Setting(scheme="residual-no-norm", depth=4, lr=3e-2)]
    if setup.long:
        adamw = [Setting(scheme="post", depth=12, steps=1000)]
    bare, sound = [*adamw, SGD[-1], *UNSTABLE], training.ladder(PRE[0])[-1]
    clipped = {setting: replace(setting, clip=CLIP) for setting in (*bare, sound)}
    outcomes = training.trained(setup, [*bare, sound, *clipped.values()])
    cases = []
    for setting in bare:
        where = f"{setting.optimizer}, {clipped[setting]}"
        for seed, outcome in outcomes[setting].items():
            guarded = outcomes[clipped[setting]][seed]
            if not outcome.trains:
                cases.append(Case(seed, where, guarded.excess, guarded.trains))
                if setting in UNSTABLE:
                    cases.append(effect(seed, where, training.reaches([guarded]), part="sgd"))
    cases += training.effects(setup, [sound, clipped[sound]], training.lead, part="harm")
    worst = UNSTABLE[0]
    shown = {setting: outcomes[setting] for setting in (worst, clipped[worst])}
    reached = {seed: max(-3.0, -found.excess) for seed, found in shown[clipped[worst]].items()}
    return Evidence(
        cases,
        Figure(f"nats under the byte frequencies that clipping reaches: {worst}, SGD", reached),
        plots=[training.curves("SGD, no norms, 6 blocks", shown, most=1.0)],
        notes=training.tally(outcomes),
    )
