"""The acceptance tests that 004 asks for, a NaN check and a gradient check, on sound and on faulty models.

Shapes: B batch, T tokens, D width.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from normscope.claims.at_start import blocks_of, weight_of
from normscope.claims.experiments import jacobian
from normscope.claims.form import Case, Evidence, Figure, Setup, claim
from normscope.claims.training import Setting, subjects, trained
from normscope.nn import build
from normscope.nn.models import Model

WIDTH, VOCAB, BATCH, TOKENS = 64, 32, 2, 8
RUNS = (Setting(scheme="pre", depth=4), Setting(scheme="post", depth=12))
SOUND = ("pre", "gpt2", "peri", "res-post", "rezero", "layerscale", "post", "deepnorm", "admin", "highway")
"""Schemes of one stream, as they start by themselves."""
CLOSE = 0.1
"""Largest distance from 1 of a derivative that is "close to 1.0"."""


@claim("C33")
def acceptance(setup: Setup) -> Evidence:
    """Both checks on sound models and on planted faults; two runs."""
    sound = [functools.partial(_sound, scheme) for scheme in SOUND]
    faulty = [functools.partial(_faulty, fault) for fault in FAULTS]
    cases = [*setup.cases(*sound, *faulty), *_runs(setup)]
    return Evidence(cases, Figure.share("% of the models, sound and faulty, judged rightly", cases))


def model_of(scheme: str, seed: int, kind: str = "decoder") -> Model:
    """A small model at its start."""
    torch.manual_seed(seed)
    return build(kind, scheme=scheme, depth=2, width=WIDTH, heads=2, vocab=VOCAB, context=TOKENS)


@torch.no_grad()
def is_finite(model: nn.Module, seed: int) -> bool:
    """The first check: no NaN and no infinity in the output of a random batch."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (BATCH, TOKENS), generator=generator)
    return bool(model(ids).logits.isfinite().all())


def farthest_derivative(model: nn.Module, seed: int) -> float:
    """The second check: the mean derivative of one token through a block that is farthest from 1."""
    x_11D = torch.randn(1, 1, WIDTH, generator=torch.Generator().manual_seed(seed))
    # tr(∂y/∂x)/D, the share of each coordinate that comes through to itself
    means = (float(jacobian(block, x_11D).diagonal().mean()) for block in blocks_of(model))
    finite_means = (0.0 if math.isnan(mean) else mean for mean in means)  # NaN is not close to 1
    return max(finite_means, key=lambda mean: abs(mean - 1))


def _sound(scheme: str, seed: int) -> Iterator[Case]:
    model = model_of(scheme, seed)
    mean = farthest_derivative(model, seed)
    close = abs(mean - 1) <= CLOSE
    where = f"{scheme}, sound, derivative"
    yield Case(seed, where, mean, close and is_finite(model, seed))
    yield Case(seed, where, mean, close, "one")


def _planted(value: float | None) -> Callable[[int], Model]:
    """Pre-LN with `value` for a weight of the first feed-forward; None: all are zero and get no gradient."""

    @torch.no_grad()
    def planted(seed: int) -> Model:
        model = model_of("pre", seed)
        feed_forward = blocks_of(model)[0].feed_forward
        if value is None:
            for parameter in feed_forward.parameters():
                parameter.zero_()
        else:
            weight_of(feed_forward.down)[0, 0] = value
        return model

    return planted


FAULTS: Mapping[str, Callable[[int], Model]] = {
    "a NaN in a weight": _planted(torch.nan),
    "an infinite weight": _planted(torch.inf),
    "residuals forgotten": lambda seed: model_of("plain", seed),
    "norms forgotten": lambda seed: model_of("residual-no-norm", seed),
    "no causal mask": lambda seed: model_of("pre", seed, "encoder"),
    "a dead branch": _planted(None),
}


def _faulty(fault: str, seed: int) -> Iterator[Case]:
    model = FAULTS[fault](seed)
    finite, mean = is_finite(model, seed), farthest_derivative(model, seed)
    found = not finite or abs(mean - 1) > CLOSE
    yield Case(seed, f"{fault}, derivative", mean, found)
    yield Case(seed, fault, float(not finite), not finite, "nan")


def _runs(setup: Setup) -> Iterator[Case]:
    outcomes = trained(setup, RUNS)  # those of the claims on warm-up, so that they are trained once
    for setting in RUNS:
        for seed, subject in subjects(setup, setting).items():
            passed, outcome = bool(subject.loss().isfinite()), outcomes[setting][seed]
            where, holds = str(setting), outcome.trains or not passed
            yield Case(seed, where, outcome.excess, holds, "trains")
