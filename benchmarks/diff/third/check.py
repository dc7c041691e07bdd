"""Check of the sets `third` and `same-third` without `normscope diff`.

    python -m benchmarks.diff.third.check

All models are built and run in float64, with the weights of one file by the conversions of both styles.

- A pair of one model: outputs and slopes are equal; fresh weights have one law.
- A planted pair: the outputs differ, or the gradients, the parameters, the laws of fresh weights, or the
  recipes, as the kind says. Without the mistake, the two sides are equal.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diff.families import State
from benchmarks.diff.fresh.check import check, exact
from benchmarks.diff.kinds import KINDS
from benchmarks.diff.plants import Case
from benchmarks.diff.third import different, same
from benchmarks.diff.third.base import Family, fresh, held, state_of
from normscope import Run

Side = tuple[Family, str, Mapping[str, Any]]
SEEDS = 6
EQUAL = 1e-9
RECIPE_STEPS = 70


def output(model: nn.Module, batch: Any) -> Tensor:
    """Logits, or states where there is no head."""
    model.eval()
    found = model(*batch) if isinstance(batch, tuple) else model(batch)
    if isinstance(found, Tensor):
        return found
    if isinstance(found, dict):
        return next(iter(found.values()))
    for name in ("logits", "last_hidden_state"):
        if hasattr(found, name):
            return getattr(found, name)
    return max((each for each in found if isinstance(each, Tensor)), key=Tensor.numel)


def moved(family: Family) -> State:
    """The reference's weights after a step in a random direction; tied weights move together."""
    model = family.reference.make()
    model.load_state_dict(state_of(family))
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator))
    return model.state_dict()


def slope(side: Side, model: nn.Module, y: Tensor) -> float:
    """Slope of the mean square of the output along the converted direction of `moved`."""
    family, name, _ = side
    convert = family.style(name).convert
    before, after = convert(state_of(family)), convert(moved(family))
    named = dict(model.named_parameters())
    slopes = torch.autograd.grad(y.square().mean(), list(named.values()), allow_unused=True)
    return sum(
        float((g * (after[key] - before[key])).sum().detach())
        for key, g in zip(named, slopes, strict=True)
        if g is not None and key in before and before[key].shape == g.shape
    )


def parting(a: Side, b: Side) -> tuple[float, float]:
    """Relative difference of the outputs and of the slopes."""
    outputs, slopes = [], []
    for side in (a, b):
        torch.manual_seed(5)
        model, batch = held(*side)
        y = output(model, batch)
        slopes.append(slope(side, model, y))
        outputs.append(y.detach())
    one, two = outputs
    away = float((one - two).abs().max() / one.abs().max())
    return away, abs(slopes[0] - slopes[1]) / abs(slopes[0])


def drawn(side: Side, *, convert: bool) -> dict[str, Tensor]:
    """Fresh weights of several seeds: of the reference, converted, or of the style itself."""
    family, name, options = side
    found: dict[str, list[Tensor]] = {}
    for seed in range(SEEDS):
        torch.manual_seed(100 * convert + seed)
        if convert:
            state = family.style(name).convert(family.reference.make().state_dict())
        else:
            model = fresh(family, name, options)[0]
            state = {key: p.detach() for key, p in model.named_parameters()}
        for key, value in state.items():
            found.setdefault(key, []).append(value.detach().flatten())
    return {key: torch.cat(each) for key, each in found.items()}


def has_one_law(side: Side) -> bool:
    """Whether the fresh weights of a style have the law of the reference's, by parameter."""
    own, reference = drawn(side, convert=False), drawn(side, convert=True)
    return all(_alike(own[key], reference[key]) for key in own if key in reference)


def _alike(x: Tensor, y: Tensor) -> bool:
    """Whether two samples agree in their mean, deviation and shape."""
    n, deviation = len(x), float(y.std())
    if min(float(x.std()), deviation) < 1e-12:
        return bool(torch.allclose(x, x[0].expand_as(x)) and torch.allclose(y, x[0].expand_as(y)))
    mean = abs(float(x.mean() - y.mean())) < 5 * deviation * (2 / n) ** 0.5
    size = abs(float(x.std()) / deviation - 1) < 5 * (1 / n) ** 0.5
    one, two = (float((each - each.mean()).abs().mean() / each.std()) for each in (x, y))
    return mean and size and abs(one - two) < 5 * n**-0.5


def written(run: Run) -> tuple[Any, ...]:
    """A recipe by parameter: rates of all steps, decay, betas, ε; clipping and accumulation."""
    (optimizer,) = run.optimizers
    (schedule,) = run.schedulers
    names = {id(p): tuple(p.shape) for p in run.model.parameters()}
    rates: dict[int, list[float]] = {}
    for _ in range(RECIPE_STEPS):
        for group in optimizer.param_groups:
            for p in group["params"]:
                rates.setdefault(id(p), []).append(round(group["lr"], 12))
        optimizer.step()  # without gradients it moves nothing; a schedule expects it
        schedule.step()
    rows: list[Any] = []
    for group in optimizer.param_groups:
        fixed = (group["weight_decay"], group["betas"], group["eps"])
        rows += [(names[id(p)], tuple(rates[id(p)]), fixed) for p in group["params"]]
    return sorted(_whole(rows)), run.clip, run.accumulation, run.precision


def _whole(rows: list[Any]) -> Iterator[tuple[Any, ...]]:
    """Numbers of entries by dimension of a parameter and its settings, which fusing does not change."""
    counts: dict[Any, int] = {}
    for shape, rate, fixed in rows:
        key = (len(shape) > 1, rate, fixed)
        counts[key] = counts.get(key, 0) + torch.Size(shape).numel()
    for key, count in counts.items():
        yield (*key, count)


def recipe(case: Case) -> tuple[bool, float]:
    """Whether the recipes differ as the case says."""
    a, b = (build() for build in (case.a, case.b))  # type: ignore[operator]
    differ = written(a) != written(b)
    return differ == bool(case.truths), float(differ)


def is_right(case: Case) -> tuple[bool, float]:
    """Whether the two sides differ as the case says, and by how much."""
    if case.architecture == "recipe":
        return recipe(case)
    a, b = case.a.args, case.b.args  # type: ignore[union-attr]
    with exact():
        forward, backward = parting(a, b)
        if not case.truths:
            laws = not case.name.startswith("fresh") or (has_one_law(a) and has_one_law(b))
            return max(forward, backward) < EQUAL and laws, max(forward, backward)
        is_alone = not b[2].get("slip") or without(a, b)
        return is_alone and is_planted(case, a, b, forward, backward), max(forward, backward)


def without(a: Side, b: Side) -> bool:
    """Whether the two sides are equal without the mistake in the code of B."""
    if b[1] in same.MISTAKEN:
        return True
    return max(parting(a, (b[0], b[1], {}))) < EQUAL


def is_planted(case: Case, a: Side, b: Side, forward: float, backward: float) -> bool:
    """Whether the pair differs where its first kind says so."""
    kind = case.truths[0].kind
    if KINDS[kind].part == "start":
        return forward < EQUAL and has_one_law(a) and not has_one_law(b)
    if KINDS[kind].backwards:
        return forward < EQUAL and backward > 1e-6
    if kind in ("tied head", "head bias"):
        sizes = [sum(p.numel() for p in held(*side)[0].parameters()) for side in (a, b)]
        return sizes[0] < sizes[1]
    laws = not case.name.startswith("fresh") or (has_one_law(a) and has_one_law(b))
    return forward > 1e-6 and laws


if __name__ == "__main__":
    check([*different.cases(), *same.cases()], is_right)
