"""Suspects for why Post-LN does not train: rank lost, gain decayed, or tokens collapsed.

Interventions distinguish them. The measurements at the start take the same weights with ε = 0, so that an
erased direction is erased wholly.

Shapes: T tokens, D width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normscope.claims.deep_jacobian import num_erased
from normscope.claims.experiments import gaussian, jacobian, of_part
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, flat
from normscope.claims.real_blocks import F64, embedded, step_jacobian, walk
from normscope.claims.training import WARMUP, Outcome, Setting, curves, trained
from normscope.nn import Decoder
from normscope.nn.norms import NoNorm
from normscope.train import MARGIN

DEPTH, LONG_DEPTH = 8, 12
"""Blocks, in the short form and in the long one."""
ALIKE = 1e-2
"""Share of the state's energy that is not common to all tokens, under which they are alike."""
POST = Setting(scheme="post", depth=DEPTH)
INTERVENTIONS = {
    "Post-LN, Xavier": POST,
    "Post-LN, Xavier, 200 steps of warm-up": replace(POST, warmup=WARMUP),
    "Post-LN, N(0, 0.02²)": replace(POST, init="normal"),
    "Post-LN with RMSNorm, Xavier": replace(POST, options="norm=rmsnorm"),
    "Post-LN with DyT for the norm, Xavier": replace(POST, options="norm=dyt"),
    "Pre-LN with its final norm, Xavier": replace(POST, scheme="pre", init="xavier"),
    "Pre-LN without final norm, Xavier": replace(POST, scheme="pre-no-final", init="xavier"),
}
NOT_PREDICTED = ("Post-LN, Xavier, 200 steps of warm-up", "Post-LN with RMSNorm, Xavier")
"""Interventions about which the text predicts nothing."""


@claim("A16", has_long=True)
def null_space_or_not(setup: Setup) -> Evidence:
    """Same kernel, other outcome: each suspect's prediction for each intervention."""
    depth = LONG_DEPTH if setup.long else DEPTH
    settings = {name: replace(setting, depth=depth) for name, setting in INTERVENTIONS.items()}
    found = trained(setup, settings.values())
    outcomes = {name: found[setting] for name, setting in settings.items()}
    starts = setup.by_seed(settings, lambda name, seed: start_of(setup, settings[name], seed))
    cases = [
        case
        for name, seed, outcome in flat(outcomes)
        for case in _suspects(name, seed, starts[name][seed], outcome)
    ]
    wrong = [case.seed for case in of_part(cases) if not case.holds]
    told = [case.holds for case in of_part(cases, "collapse")]
    what = f"wrong predictions of the null space, of {len(settings) - len(NOT_PREDICTED)} interventions"
    return Evidence(
        cases,
        Figure(what, {seed: wrong.count(seed) for seed in setup.seeds}),
        plots=[curves("Each intervention", outcomes, most=1.0)],
        notes=[
            *(_fate(name, by_seed, starts[name]) for name, by_seed in outcomes.items()),
            f"Collapse of the tokens tells {sum(told)} of {len(told)} runs.",
        ],
    )


@dataclass(frozen=True)
class Start:
    """A stack before the first step.

    Attributes:
        by_layer: directions of a token that do not come through its first layer.
        by_stack: directions of a token that do not come through all layers and the final norm.
        gain: of a random gradient from the stack's end to its entry, beside the stream there.
        diversity: share of the state's energy at the end that tells tokens apart.
    """

    by_layer: int
    by_stack: int
    gain: float
    diversity: float


def _suspects(name: str, seed: int, start: Start, outcome: Outcome) -> Iterator[Case]:
    """A case a suspect; the effect is how far the run ends on the predicted side, in nats, at most 3."""
    predictions = {
        "": start.by_layer >= 2,
        "end": start.by_stack >= 2,
        "any": start.by_layer >= 1,
        "gain": start.gain <= 0.1,
        "tokens": start.diversity <= ALIKE,
        "collapse": outcome.certain is not None,
    }
    for part, fails in predictions.items():
        if name in NOT_PREDICTED and part in ("", "end"):
            continue
        above = max(-3.0, min(3.0, outcome.excess + MARGIN))
        value = above if fails else -above
        yield Case(seed, name, value, value >= 0, part)


def _fate(name: str, by_seed: Mapping[int, Outcome], starts: Mapping[int, Start]) -> str:
    layer, stack = (
        "/".join(str(count) for count in sorted({getattr(start, of) for start in starts.values()}))
        for of in ("by_layer", "by_stack")
    )
    trains = f"trains on {sum(outcome.trains for outcome in by_seed.values())} of {len(by_seed)} seeds"
    return f"{name}: {layer} directions erased by a layer, {stack} by the stack; {trains}."


def start_of(setup: Setup, setting: Setting, seed: int) -> Start:
    """The measures of a setting's model at its start, on its own first batch."""
    options = ",".join(filter(None, (setting.options, "eps=0")))
    subject = replace(setting, options=options).subject(setup, seed)
    model, batch = subject.model, next(subject.batches())
    assert isinstance(model, Decoder)
    assert isinstance(batch, dict)
    model = model.to(F64).eval().requires_grad_(False)
    x = embedded(model, batch["ids"])
    return Start(*_erased(model, x[:1, :1]), *_through(model, x))


def _erased(model: Decoder, x_11D: Tensor) -> tuple[int, int]:
    """Directions of one token by itself lost in the first layer, and in the stack with its final norm."""
    layers, end = walk(model, x_11D)
    factors = [step_jacobian(layer) for layer in layers]
    if not isinstance(model.final_norm, NoNorm):
        factors.append(jacobian(model.final_norm, end))
    return num_erased(factors[:1]), num_erased(factors)


def _through(model: Decoder, x: Tensor) -> tuple[float, float]:
    """Gain of a random gradient from the stack's end to its entry, and the tokens' diversity at the end."""
    x = x.clone().requires_grad_()
    y = model.run(x)
    weight = gaussian(0, *y.shape)
    back = torch.autograd.grad((y * weight).sum(), x)[0]
    apart = (y - y.mean((0, 1), keepdim=True)).detach()
    scale = float(y.detach().norm() / x.detach().norm())
    diversity = float(apart.square().sum() / y.detach().square().sum())
    return float(back.norm() / weight.norm()) / scale, diversity
