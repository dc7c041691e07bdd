"""Why Post-LN does not train: rank lost, gain decayed, or tokens collapsed; told apart by intervening.

Runs: decoders of d = 32 on bytes of text, AdamW, 300 steps; one trains when its last losses are 0.1 nats
under the unigram entropy. What is measured at the start has the same
weights with ε = 0, so that what is erased is erased wholly.

Shapes: T tokens, D width.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.claims.claim import Kind, Sentence, claim
from normscope.claims.deep_jacobian import num_erased
from normscope.claims.evidence import Case, Evidence, Figure, Line, Plot
from normscope.claims.look import Look
from normscope.claims.real_blocks import F64, at_last_token, embedded, jacobian, walk
from normscope.claims.sources import Source
from normscope.maps import Result
from normscope.nn import Decoder
from normscope.nn.norms import NoNorm
from normscope.train import RunConfig, last_loss

WIDTH, DEPTH, LONG_DEPTH, LR = 32, 6, 12, 3e-3
ALIKE = 1e-2
"""Share of the state's energy that is not common to all tokens, under which they are alike."""


@dataclass(frozen=True)
class Variant:
    """One model and how it is trained."""

    name: str
    options: str
    warmup: int = 0

    def config(self, depth: int, seed: int, lr: float = LR) -> RunConfig:
        """300 steps of it."""
        model = f"nn:decoder,{self.options},depth={depth},width={WIDTH},heads=2"
        values: dict[str, Any] = {"model": model, "validation": 0.0, "lr": lr, "warmup": self.warmup}
        return RunConfig.from_dict(values | {"seed": seed})


POST = Variant("Post-LN, Xavier", "scheme=post,init=xavier")
VARIANTS = (
    POST,
    Variant("Post-LN, Xavier, 200 steps of warm-up", "scheme=post,init=xavier", 200),
    Variant("Post-LN, N(0, 0.02²)", "scheme=post,init=normal"),
    Variant("Post-LN with RMSNorm, Xavier", "scheme=post,init=xavier,norm=rmsnorm"),
    Variant("Post-LN with DyT for the norm, Xavier", "scheme=post,init=xavier,norm=dyt"),
    Variant("Pre-LN with its final norm, Xavier", "scheme=pre,init=xavier"),
    Variant("Pre-LN without final norm, Xavier", "scheme=pre-no-final,init=xavier"),
)


@claim(
    "A16",
    Source("000", "§7", "LayerNorm 的零空间直接导致整层梯度退化，这解释了其训练不稳定性"),
    Source("000", "Abstract", "为实践中观察到的 Post-LN 训练不稳定现象提供了严格的数学解释"),
    Source("000", "Remark 3.7", "这一结构性缺陷在多层堆叠时会持续存在, 导致训练不稳定"),
    says="The null space of LayerNorm explains why Post-LN fails to train: with the two lost directions a "
    "token a "
    "stack fails, without them it trains.",
    kind=Kind.TENDENCY,
    has_long=True,
    hypothesis="each of seven interventions fails to train if and only if its stack, with the final norm, "
    "erases two "
    "directions a token: norms with two, one and no lost directions, Pre-LN with and without final norm, "
    "weights, "
    "warm-up; d = 32, 6 blocks (12 in the long form), AdamW at 3e-3",
    parts={
        "any": Sentence("One erased direction is enough: it fails if and only if any is erased."),
        "gain": Sentence(
            "Not rank but gain: it fails if and only if the gradient is tenfold smaller at the entry."
        ),
        "tokens": Sentence(
            "Not rank but tokens: it fails if and only if the share of the state that tells tokens apart is "
            "under 1 % "
            "at the end of the stack at the start."
        ),
        "collapse": Sentence(
            "It fails if and only if every token comes to look the same while it trains (token diversity ≤ "
            "1e-10)."
        ),
    },
)
def null_space_or_not(look: Look) -> Evidence:
    """Same kernel, other outcome: what each suspect predicts for each intervention."""
    depth = LONG_DEPTH if look.long else DEPTH
    cases: list[Case] = []
    curves: dict[str, list[Result]] = {}
    words: dict[str, list[str]] = {}
    configs = [variant.config(depth, seed) for variant in VARIANTS for seed in look.seeds]
    results = iter(look.train(configs))
    for variant in VARIANTS:
        for seed in look.seeds:
            result = next(results)
            start = _start(look, variant, depth, seed)
            cases += _suspects(variant, seed, start, result)
            curves.setdefault(variant.name, []).append(result)
            words.setdefault(variant.name, []).append(result.verdict)
    wrong = [case for case in cases if not case.part and not case.holds]
    return Evidence(
        cases=cases,
        figure=Figure(
            f"interventions of {len(VARIANTS)} that the null space foretells wrongly",
            {s: sum(case.seed == s for case in wrong) for s in look.seeds},
        ),
        plots=[_curves_plot(curves)],
        notes=[_fates(name, words[name], cases) for name in words],
        of="runs",
    )


@dataclass(frozen=True)
class _Start:
    """What a stack is before the first step: directions erased a token, the gradient's gain, tokens' "
    "diversity."""

    erased: int
    gain: float
    diversity: float


def _suspects(variant: Variant, seed: int, start: _Start, result: Result) -> Iterator[Case]:
    fails, loss = result.verdict == "fails", last_loss(result.losses)
    predictions = {
        "": (start.erased >= 2, f"{start.erased} directions erased"),
        "any": (start.erased >= 1, f"{start.erased} directions erased"),
        "gain": (start.gain <= 0.1, f"gradient × {start.gain:.2g}"),
        "tokens": (start.diversity <= ALIKE, f"diversity {start.diversity:.2g}"),
        "collapse": (result.certain is not None, result.certain or "tokens stay apart"),
    }
    for part, (foretold, why) in predictions.items():
        where = f"{variant.name}: {why}, {result.verdict}, loss"
        yield Case(seed=seed, where=where, value=loss, holds=bool(foretold) == fails, part=part)


def _fates(name: str, verdicts: list[str], cases: list[Case]) -> str:
    own = next(case for case in cases if not case.part and case.where.startswith(name + ":"))
    erased = own.where.removeprefix(name + ": ").partition(",")[0]
    return f"{name}: {erased}, trains on {verdicts.count('trains')} of {len(verdicts)} seeds."


def _start(look: Look, variant: Variant, depth: int, seed: int) -> _Start:
    config = variant.config(depth, seed)
    text = look.text and str(look.text)
    subject = config.replace(text=text, model=f"{config.model},eps=0").subject()
    model = subject.model
    assert isinstance(model, Decoder)
    batch = next(subject.batches())
    assert isinstance(batch, dict)
    model = model.to(F64).eval().requires_grad_(False)
    x = embedded(model, batch["ids"])
    return _Start(_erased(model, x[:1, :1]), *_through(model, x))


def _erased(model: Decoder, x_11D: Tensor) -> int:
    """Directions of one token by itself that do not come through the stack and its final norm."""
    layers, end = walk(model, x_11D)
    factors = [jacobian(*at_last_token(layer.step, layer.x)) for layer in layers]
    if not isinstance(model.final_norm, NoNorm):
        factors.append(jacobian(model.final_norm, end[0, 0]))
    return num_erased(factors)


def _through(model: Decoder, x: Tensor) -> tuple[float, float]:
    """Gain of a random gradient from the stack's end to its entry, and the diversity of the tokens at its "
    "end."""
    x = x.clone().requires_grad_()
    y = model.run(x)
    weight = torch.randn(y.shape, dtype=F64, generator=torch.Generator().manual_seed(0))
    back = torch.autograd.grad((y * weight).sum(), x)[0]
    apart = (y - y.mean((0, 1), keepdim=True)).detach()
    scale = float(y.detach().norm() / x.detach().norm())
    diversity = float(apart.square().sum() / y.detach().square().sum())
    return float(back.norm() / weight.norm()) / scale, diversity


def _curves_plot(curves: dict[str, list[Result]]) -> Plot:
    lines = []
    for name, results in curves.items():
        points = {
            float(step): [_mean(result.losses[max(0, step - 10) : step + 10]) for result in results]
            for step in range(0, 300, 15)
        }
        lines.append(Line.over_seeds(name, points))
    entropy = next(iter(curves.values()))[0].unigram_entropy
    return Plot("Loss of each intervention", "step", "nats", lines, levels={"unigram entropy": entropy})


def _mean(losses: tuple[float, ...]) -> float:
    return sum(losses) / len(losses) if losses else math.nan


SMALL_RATES = (3e-4, 1e-3)


@claim(
    "A23",
    Source("000", "§7", "需要小学习率、warm-up、对深度敏感"),
    Source("001", "§2.B", "在训练开始时使用极小的学习率"),
    says="Post-LN needs a smaller learning rate than Pre-LN.",
    condition="Xavier weights",
    kind=Kind.TENDENCY,
    has_long=True,
    hypothesis="without warm-up Post-LN fails at 3e-3, where Pre-LN trains, and trains at 1e-3 or 3e-4: "
    "Xavier and "
    "N(0, 0.02²) weights, d = 32, 6 blocks (12 in the long form), AdamW",
)
def needs_small_rates(look: Look) -> Evidence:
    """Which rates train, for both placements and two starts."""
    depth = LONG_DEPTH if look.long else DEPTH
    post, normal, pre = POST, VARIANTS[2], VARIANTS[5]
    asked = [(post, lr) for lr in (*SMALL_RATES, LR)] + [(normal, LR), (pre, LR)]
    configs = [variant.config(depth, seed, lr) for variant, lr in asked for seed in look.seeds]
    found = dict(
        zip([(v.name, lr, s) for v, lr in asked for s in look.seeds], look.train(configs), strict=True)
    )
    cases = [case for seed in look.seeds for case in _rate_cases(found, seed)]
    losses = [
        Line.over_seeds("Post-LN, Xavier", {lr: _losses(found, post, lr, look) for lr in (*SMALL_RATES, LR)}),
        Line.over_seeds("Post-LN, N(0, 0.02²)", {LR: _losses(found, normal, LR, look)}, marks=True),
        Line.over_seeds("Pre-LN, Xavier", {LR: _losses(found, pre, LR, look)}, marks=True),
    ]
    entropy = next(iter(found.values())).unigram_entropy
    return Evidence(
        cases=cases,
        figure=Figure(
            "loss of Post-LN, Xavier, at 3e-3 minus its best at 1e-3 or 3e-4, in nats",
            {
                s: _loss(found, post, LR, s) - min(_loss(found, post, lr, s) for lr in SMALL_RATES)
                for s in look.seeds
            },
        ),
        plots=[Plot("Last loss by learning rate", "lr", "nats", losses, "x", {"unigram entropy": entropy})],
        of="cases",
    )


Found = dict[tuple[str, float, int], Result]


def _rate_cases(found: Found, seed: int) -> Iterator[Case]:
    post, normal, pre = POST.name, VARIANTS[2].name, VARIANTS[5].name
    for name, trains in ((post, False), (normal, False), (pre, True)):
        result = found[name, LR, seed]
        holds = (result.verdict == "trains") is trains
        where = f"{name} at 3e-3 {result.verdict}, loss"
        yield Case(seed=seed, where=where, value=last_loss(result.losses), holds=holds, met=name != normal)
    small = {lr: found[post, lr, seed] for lr in SMALL_RATES}
    best = min(small, key=lambda lr: last_loss(small[lr].losses))
    trained = any(result.verdict == "trains" for result in small.values())
    where = f"{post} at {best:g} {small[best].verdict}, loss"
    yield Case(seed=seed, where=where, value=last_loss(small[best].losses), holds=trained)


def _loss(found: Found, variant: Variant, lr: float, seed: int) -> float:
    return last_loss(found[variant.name, lr, seed].losses)


def _losses(found: Found, variant: Variant, lr: float, look: Look) -> list[float]:
    return [_loss(found, variant, lr, seed) for seed in look.seeds]
