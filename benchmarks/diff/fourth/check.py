"""Check of the sets `fourth` and `same-fourth` without `normscope diff`.

    python -m benchmarks.diff.fourth.check [PART OF A NAME]

Both sides are built and run in float64, and code that asks for float32 gets float64. A pair without mistakes
must have outputs that are equal to 1e-9 and gradients of equal size. A pair with mistakes must differ, and
must be equal once its mistakes are left out. Fresh pairs get the same weights by the second style's
conversion, and their fresh weights must have the same mean squares.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.diff.fourth.base import Pair, State, build
from benchmarks.diff.kinds import KINDS

TOLERANCE = 1e-9
SEEN = 1e-7
"""Relative difference from which on a mistake counts as seen."""
DRAWS = 12


class Exact(TorchFunctionMode):
    """Mode in which float32 means float64."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call with float64 in place of float32."""
        if function is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return function(*args, **kwargs)


@contextmanager
def exact() -> Iterator[None]:
    """Context in which models are built and run in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        with Exact(), torch.random.fork_rng():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def output(model: nn.Module, batch: Any) -> Tensor:
    """The first tensor that a model gives."""
    if isinstance(batch, dict):
        found = model(**batch)
    else:
        found = model(*batch) if isinstance(batch, tuple) else model(batch)
    if isinstance(found, Tensor):
        return found
    values = (
        found.values()
        if hasattr(found, "values")
        else vars(found).values()
        if hasattr(found, "__dict__")
        else found
    )
    return next(each for each in values if isinstance(each, Tensor) and each.dim() > 1)


def measured(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """Output and the size of all gradients, in eval mode."""
    model = model.double().eval()
    if isinstance(batch, Tensor) and batch.is_floating_point():
        batch = batch.double()
    y = output(model, batch)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    model.zero_grad()
    (y * weights).sum().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return y.detach(), float(sum(g.square().sum() for g in grads)) ** 0.5


def parted(pair: Pair, *, is_clean: bool) -> tuple[float, float]:
    """Relative difference of outputs and of the sizes of gradients."""
    loaded = replace(pair, is_fresh=False) if pair.is_fresh else pair
    with exact():
        sides = []
        for which in ("a", "b"):
            model = build(loaded, which, is_clean=is_clean)
            torch.manual_seed(2)
            sides.append(measured(model, pair.family.batch()))
    (y, grad), (other, slope) = sides
    if y.shape != other.shape:
        return float("inf"), float("inf")
    return float((y - other).abs().max() / y.abs().max()), abs(slope / grad - 1)


def unlike(pair: Pair) -> list[str]:
    """Weights whose fresh mean squares differ between the sides, or whose mean differs."""
    sums: list[dict[str, Tensor]] = [{}, {}]
    style = pair.family.styles[pair.b]
    counts: dict[str, int] = {}
    for seed in range(DRAWS):
        for which, total in zip("ab", sums, strict=True):
            torch.manual_seed(100 * seed + (which == "b"))
            model = build(pair, which)
            state = model.state_dict() if which == "b" else fresh_a(pair, model, style.carry)
            names = {name for name, _ in model.named_parameters()} if which == "b" else set(state)
            for name in names:
                value = state[name].double()
                moments = torch.stack([value.mean(), value.square().mean(), value.pow(4).mean()])
                total[name] = total.get(name, torch.zeros(3, dtype=torch.float64)) + moments / DRAWS
                counts[name] = value.numel() * DRAWS
    a, b = sums
    found = []
    for name in sorted(set(a) & set(b)):
        far = 6 / counts[name] ** 0.5
        root = max(float(a[name][1]) ** 0.5, 1e-30)
        if abs(float(a[name][0] - b[name][0])) / root > far:
            found.append(f"mean of {name}")
        if abs(float(b[name][1] / a[name][1]) - 1) > 2 * far and float(a[name][1] + b[name][1]) > 0:
            found.append(f"size of {name}: {float(b[name][1] / a[name][1]) ** 0.5:.3f}")
        if abs(float(b[name][2] / a[name][2]) - 1) > 8 * far and float(a[name][2] + b[name][2]) > 0:
            found.append(f"law of {name}")
    return found


def fresh_a(pair: Pair, model: nn.Module, carry: Callable[[State], State]) -> State:
    """The fresh weights of the first side under the names of the second one."""
    del pair
    return carry(dict(model.state_dict()))


def lost(pair: Pair) -> list[str]:
    """Places of the truths that the two models lack."""
    found = []
    for number, which in enumerate("ab"):
        with exact():  # the weights of a file are drawn once, and in float64
            model = build(pair, which, is_clean=True)
        known = [*dict(model.named_modules()), *dict(model.named_parameters()), "*"]
        for truth in pair.case().truths:
            sides = [site[number] for site in truth.sites]
            found += [f"{which}: {each}" for each in sides if not set(each) & set(known)]
    return found


def verdict(pair: Pair) -> str:
    """The fault of a pair; empty where the pair is as it says."""
    if missing := lost(pair):
        return f"places that are not in the models: {missing}"
    starts = [each for each in pair.mistakes if KINDS[each.kind].part == "start"]
    forward, backward = parted(pair, is_clean=True)
    if not max(forward, backward) < TOLERANCE:
        return f"not the same without mistakes: {forward:.1e}, gradients {backward:.1e}"
    if pair.is_fresh:
        found = unlike(pair)
        if bool(found) != bool(starts):
            return f"fresh weights: {found}"
        pair = replace(pair, mistakes=tuple(each for each in pair.mistakes if each not in starts))
    for number in range(len(pair.mistakes)):
        single = replace(pair, mistakes=pair.mistakes[number : number + 1])
        kind = single.mistakes[0].kind
        forward, backward = parted(single, is_clean=False)
        if KINDS[kind].backwards:
            if forward > TOLERANCE or backward < SEEN:
                return f"{kind}: outputs {forward:.1e}, gradients {backward:.1e}"
        elif not forward > SEEN:
            return f"{kind} is not seen: {forward:.1e}"
    return ""


def main() -> None:
    """Check all pairs whose name has the given text."""
    from benchmarks.diff.fourth import different, recipes, same

    only = sys.argv[1] if len(sys.argv) > 1 else ""
    warnings.simplefilter("ignore")
    bad = 0
    pairs = [*different.pairs(), *same.pairs()]
    names = [each.name for each in pairs]
    for name in sorted({name for name in names if names.count(name) > 1}):
        print(f"TWICE {name}")
        bad += 1
    for pair in pairs:
        if only in pair.name:
            said = verdict(pair)
            bad += bool(said)
            print(f"{'WRONG' if said else 'right'}  {pair.name}  {said}", flush=True)
    for name, said in recipes.checked():
        if only in name:
            bad += bool(said)
            print(f"{'WRONG' if said else 'right'}  {name}  {said}", flush=True)
    print(f"{bad} wrong")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
