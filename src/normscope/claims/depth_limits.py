"""The depth to which stacks train: Post-LN and Pre-LN, with residuals, without, with gates in their place.

Shapes: B batch, T tokens, D width.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from normscope.claims import training
from normscope.claims.at_start import blocks_of, size_of, stack_of
from normscope.claims.experiments import calls_of, gaussian
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, flat, lines_along, mapped, plots
from normscope.claims.training import WARMUP, Setting
from normscope.claims.warmup import POST, POST_NORMAL, SLOWER
from normscope.nn.schemes.gates import HighwayGate
from normscope.subjects import Subject

THIN = Setting(scheme="pre", depth=100, width=16, steps=140)
"""A hundred blocks; a run that is under the byte frequencies so early trains."""
NO_NORM = Setting(scheme="residual-no-norm", depth=16)
PLAIN = Setting(scheme="plain", depth=4)
LONGER = Setting(scheme="post", depth=12, lr=5e-4, warmup=300, steps=1000)
WARM = replace(POST[2], warmup=WARMUP)
NORMAL = replace(POST_NORMAL[-1], depth=12, warmup=WARMUP)
CHAIN_WIDTH = 16
CHAIN = {"plain": 100, "residual-no-norm": 20, "post": 100, "pre": 1000, "highway": 100}
"""Blocks that a gradient is followed through, by scheme."""


@claim("B5", has_long=True)
def depth_of_post(setup: Setup) -> Evidence:
    """The best of the settings, by initialisation; Pre-LN at the same settings, and of a hundred blocks."""
    xavier, normal, thin = [POST[2], WARM, replace(WARM, lr=SLOWER)], NORMAL, THIN
    if setup.long:
        deep = Setting(scheme="post", depth=24, lr=SLOWER, warmup=300, steps=600)
        xavier, normal = [deep], replace(deep, init="normal")
        thin = replace(THIN, depth=128, steps=200)
    settings = {"": [*xavier, normal], "xavier": xavier, "longer": [] if setup.long else [LONGER]}
    outcomes = training.trained(setup, [*settings[""], *settings["longer"]])
    cases = []
    for part, tried in settings.items():
        for seed in setup.seeds if tried else ():
            setting, found = training.best({setting: outcomes[setting] for setting in tried}, seed)
            cases.append(Case(seed, str(setting), found.excess, not found.trains, part))
    for post in [] if setup.long else xavier[:2]:
        pair = [post, replace(post, scheme="pre")]
        cases += training.effects(setup, pair, training.lead, part="harder")
    cases += training.effects(setup, [thin], training.reaches, part="pre")
    return Evidence(
        cases,
        Figure.largest("deep Post-LN at its best ends above the byte frequencies by, in nats", cases),
        plots=[training.curves("Post-LN of 12 blocks", outcomes)],
        notes=training.tally(outcomes),
        unmeasured=[f"100 blocks: {thin.steps} steps at d = {thin.width} and not 300 at d = 32"],
    )


@claim("C2", has_long=True)
def residuals_carry_depth(setup: Setup) -> Evidence:
    """Gradients at the start through up to 1000 blocks, and short trainings."""
    chains = setup.by_seed(CHAIN, lambda name, seed: log_gradients(name, CHAIN[name], CHAIN_WIDTH, seed))
    deep, plain = [NO_NORM, WARM, NORMAL, THIN], training.ladder(PLAIN, (1e-3, 3e-3))
    if setup.long:
        deep = [replace(THIN, steps=300), replace(NO_NORM, lr=1e-3, depth=32)]
    outcomes = training.trained(setup, [*deep, *plain])
    cases = [case for chain in flat(chains) for case in _chain_cases(*chain)]
    trainings = {setting: outcomes[setting] for setting in deep}
    for setting, seed, found in flat(trainings):
        for part in _parts(setting.scheme):
            cases.append(Case(seed, str(setting), found.excess, found.trains, part))
    for seed in setup.seeds:
        setting, found = training.best({setting: outcomes[setting] for setting in plain}, seed)
        cases.append(Case(seed, str(setting), found.excess, found.trains, "shallow"))
    lines = lines_along(range(1, 101), mapped(chains, lambda logs: logs[1:]))
    lost = {seed: -logs[20] for seed, logs in chains["plain"].items()}
    return Evidence(
        cases,
        Figure("decades that a gradient loses through 20 blocks without residuals", lost),
        plots=plots("C2", lines),
        notes=training.tally(trainings),
    )


def _parts(scheme: str) -> tuple[str, ...]:
    return ("", "pre") if scheme == "pre" else ("",)


def _chain_cases(name: str, seed: int, logs: Sequence[float]) -> Iterator[Case]:
    where = f"{name}, gradient through {len(logs) - 1} blocks, decades"
    if name == "plain":
        fit = statistics.correlation(range(len(logs)), logs)
        yield Case(seed, where, logs[20], logs[20] <= -3, "limit")
        yield Case(seed, f"{name}, correlation of log gradient and depth", fit, fit <= -0.98, "exponential")
    elif name != "highway":
        holds = 10 ** min(abs(logs[-1]), 300) <= len(logs) - 1
        for part in _parts(name):
            yield Case(seed, where, logs[-1], holds, part)


SHAPE = (1, 8)
"""Sequences and tokens that a gradient is followed for."""


def log_gradients(
    scheme: str, depth: int, width: int, seed: int, gate_bias: float | None = None
) -> list[float]:
    """log10 of ‖gradient of a random read-out in x_l‖ over that in x_L, from l = L down to 0, at the start.

    Each block is differentiated alone, in float64, and the gradient scaled to length 1 before the next, which
    changes nothing: it goes through a block linearly. A stream that overflows leaves nan from there on.
    """
    stack = stack_of(scheme, depth, seed, width=width, heads=2).double()
    if gate_bias is not None:
        for gate in gates_of(stack):
            nn.init.constant_(gate.transform.bias, gate_bias)
    start, cotangent = gaussian(seed, 2, *SHAPE, width)
    with torch.no_grad():
        streams = list(itertools.accumulate(stack.blocks, lambda state, block: block(state), initial=start))
    logs, cotangent = [0.0], cotangent / cotangent.norm()
    for block, x_BTD in zip(reversed(stack.blocks), reversed(streams[:-1]), strict=True):
        x_BTD.requires_grad_(True)
        (gradient,) = torch.autograd.grad(block(x_BTD), x_BTD, cotangent)
        length = float(gradient.norm())
        logs.append(logs[-1] + math.log10(length) if 0 < length < math.inf else math.nan)
        cotangent = gradient / length if length else gradient
    return logs


def gates_of(module: nn.Module) -> list[HighwayGate]:
    """The gates in a module, in order."""
    return [gate for gate in module.modules() if isinstance(gate, HighwayGate)]


HIGHWAY = Setting(scheme="highway", depth=8, steps=100)
BIASES, HELD_OUT_BIASES = (0.0, -2.0, -4.0), (-1.0, -3.0)
"""Gate biases: those of the paper (Srivastava et al. 2015) are -1 to -4."""
LOST = 3.0
"""Decades."""
OPEN = math.log(10 ** (LOST / (2 * CHAIN["highway"])) - 1)
"""A gate passes on 1 − σ(b) of the stream: from this bias on 200 gates lose three decades."""


@claim("C3")
def gates_vanish(setup: Setup) -> Evidence:
    """Gradient through 100 gated blocks by bias, the gates before and after training, parameters."""
    cases, depth = [], CHAIN["highway"]
    for seed in setup.seeds:
        for bias in setup.sizes(BIASES, HELD_OUT_BIASES):
            lost = -log_gradients("highway", depth, CHAIN_WIDTH, seed, gate_bias=bias)[-1]
            where = f"bias {bias:g}, decades lost through {depth} blocks"
            cases.append(Case(seed, where, lost, lost > LOST, met=bias > OPEN))
    figure = Figure.largest("most decades lost through 100 gated blocks", cases)
    if setup.fresh:  # the parts have no condition to confirm
        return Evidence(cases, figure)
    before, after, extra = _gates(setup)
    for seed in setup.seeds:
        lost, fell = -log_gradients("pre", depth, CHAIN_WIDTH, seed)[-1], before[seed] - after[seed]
        cases.append(Case(seed, f"pre, decades lost through {depth} blocks", lost, abs(lost) < 1, "residual"))
        where = f"mean of t from {before[seed]:.3f} to {after[seed]:.3f}"
        cases.append(Case(seed, where, fell, fell > 0, "trained"))
    where = f"{HIGHWAY.width} wide, share of a block's parameters"
    cases.append(Case(None, where, extra, extra > 0.01, "parameters"))
    notes = [f"Gates add {extra:.1%} to the parameters of a block of width {HIGHWAY.width}."]
    return Evidence(cases, figure, notes=notes)


def _gates(setup: Setup) -> tuple[dict[int, float], dict[int, float], float]:
    """Mean gate of each seed's model before and after training; the gates' share of a block's parameters."""
    models = training.subjects(setup, HIGHWAY)
    before = {seed: _mean_gate(subject) for seed, subject in models.items()}
    training.train_models(models, HIGHWAY)
    after = {seed: _mean_gate(subject) for seed, subject in models.items()}
    model = next(iter(models.values())).model
    gates, blocks = size_of(gates_of(model)), size_of(blocks_of(model))
    return before, after, gates / (blocks - gates)


def _mean_gate(subject: Subject) -> float:
    """The mean of t on the subject's fixed batch, with the model as it is."""
    with torch.no_grad(), calls_of(gate.transform for gate in gates_of(subject.model)) as calls:
        subject.loss()
    return statistics.fmean(float(out.sigmoid().mean()) for _, _, out in calls)
