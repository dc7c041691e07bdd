"""Check of the sets `fresh` and `same-fresh` without `normscope diff`: whether the two sides differ.

    python -m benchmarks.diff.fresh.check

Both sides are built and run in float64, with the weights that they hold, or with weights that our own
conversion gives to both. Casts to float32 give float64 here, so that two ways to write one model agree.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from scipy.stats import ks_2samp
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.diff.fresh import different, same
from benchmarks.diff.fresh.decoders import Decoder
from benchmarks.diff.fresh.encoders import FAMILIES
from benchmarks.diff.fresh.published import forget, loaded
from benchmarks.diff.fresh.weights import canon_of, pack
from benchmarks.diff.kinds import KINDS
from benchmarks.diff.plants import Case
from normscope import Run

SEEDS = range(6)
"""Seeds of fresh weights."""


class Doubles(TorchFunctionMode):
    """Casts to float32 give float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        wide = {k: _wide(v) for k, v in (kwargs or {}).items()}
        return func(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def exact() -> Iterator[None]:
    """Context in which all models are built and run in float64."""
    known = torch.get_default_dtype()
    forget()
    torch.set_default_dtype(torch.float64)
    try:
        with Doubles():
            yield
    finally:
        torch.set_default_dtype(known)
        forget()


def sides(case: Case) -> tuple[nn.Module, nn.Module]:
    """Both models, with the same weights unless the case gives them their own."""
    name = case.name.partition(": ")[2]
    if case.name.startswith("refactoring: ") and name in (found := same.pairs()):
        opt, a, b = found[name]
        return same.held(opt, a), same.held(opt, b)
    made = [case.a(), case.b()]  # type: ignore[operator]
    a, b = (each[0] if isinstance(each, tuple) else each for each in made)
    if case.name.startswith("rewrite"):
        for model in (a, b):
            assert isinstance(model, Decoder)
            loaded(model, pack(canon_of(a.opt, 3), a.opt, model.style))
    if name == "time first":
        loaded(b, same.into_hand(a.state_dict()))
    return a, b


def batch_of(case: Case, model: nn.Module) -> Any:
    """A batch for both sides."""
    if case.architecture in FAMILIES:
        batch = FAMILIES[case.architecture].batch()
        is_image = isinstance(batch, Mapping) and "pixel_values" in batch
        return {k: v.double() for k, v in batch.items()} if is_image else batch
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    tables += [len(p) for n, p in model.named_parameters() if n == "embedding"]
    return torch.randint(0, tables[0], (3, 48), generator=torch.Generator().manual_seed(1))


def output(model: nn.Module, batch: Any) -> Tensor:
    found = model.eval()(**batch) if isinstance(batch, Mapping) else model.eval()(batch)
    return found if isinstance(found, Tensor) else found.logits


def difference(case: Case) -> float:
    """Largest difference of the outputs relative to the largest output; for planted gradients, of these."""
    with exact():
        a, b = sides(case)
        batch = batch_of(case, a)
        outputs = [output(model, batch) for model in (a, b)]
        if any(KINDS[truth.kind].backwards for truth in case.truths):
            outputs = [_gradient(model, y) for model, y in zip((a, b), outputs, strict=True)]
        a_out, b_out = (each.detach() for each in outputs)
        return float((a_out - b_out).abs().max() / a_out.abs().max())


def _gradient(model: nn.Module, y: Tensor) -> Tensor:
    """The gradient in the first table."""
    return torch.autograd.grad(y.square().mean(), next(iter(model.parameters())))[0]


def start_of(case: Case) -> float:
    """Smallest p-value that the fresh weights of a parameter have the same law on both sides."""
    drawn = []
    for build in (case.a, case.b):
        held: dict[str, list[Tensor]] = {}
        for seed in SEEDS:
            torch.manual_seed(seed)
            for name, value in build().named_parameters():  # type: ignore[operator]
                if value.dim() > 1:
                    held.setdefault(name, []).append(value.detach().flatten())
        drawn.append({name: torch.cat(values).numpy() for name, values in held.items()})
    return min(float(ks_2samp(drawn[0][name], drawn[1][name]).pvalue) for name in drawn[0])


def recipe_of(run: Run) -> dict[str, Any]:
    """Numbers of trained and decayed weights, and settings of the optimizer."""
    known = {id(p): n for n, p in run.model.named_parameters()}
    optimizer: Any = run.optimizer
    made: dict[str, Any] = {
        "clip": run.clip,
        "trained": 0,
        "decayed": 0,
        "betas": optimizer.defaults["betas"],
    }
    for group in optimizer.param_groups:
        count = sum(p.numel() for p in group["params"] if id(p) in known)
        made["trained"] += count
        made["decayed"] += count if group["weight_decay"] else 0
    return made


def is_right(case: Case) -> tuple[bool, float]:
    """Whether the two sides differ as the case says, and by how much."""
    planted = bool(case.truths)
    if case.architecture == "start":
        p = start_of(case)
        return (p < 1e-12) if planted else (p > 1e-3), p
    if case.architecture == "recipe":
        a, b = (recipe_of(build()) for build in (case.a, case.b))  # type: ignore[operator]
        return (a != b) == planted, float(a != b)
    found = difference(case)
    return (found > 1e-6) if planted else (found < 1e-9), found


def check(cases: Iterable[Case], judge: Callable[[Case], tuple[bool, float]]) -> None:
    """Print each case of a set, with its judgement by `judge` and its difference, and the counts."""
    parser = argparse.ArgumentParser(description="Check the truth of a set of pairs without normscope diff.")
    parser.add_argument("--only", default="", help="part of the names of cases")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    wrong = 0
    chosen = [case for case in cases if only in case.name]
    for case in chosen:
        right, size = judge(case)
        wrong += not right
        print(f"{'right' if right else 'WRONG'}  {size:.1e}  {case.name}", flush=True)
    print(f"{len(chosen)} cases, {wrong} wrong")


if __name__ == "__main__":
    check([*different.cases(), *same.cases()], is_right)
