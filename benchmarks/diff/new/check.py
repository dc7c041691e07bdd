"""Check of the sets `new` and `same-new` without `normscope diff`: whether the two sides differ.

    python -m benchmarks.diff.new.check

Both sides are built and run in float64. Where a pair is fresh, both get the same weights by their own
conversions.
"""

from typing import Any

import torch

from benchmarks.diff.fresh.check import check, exact, output
from benchmarks.diff.fresh.weights import canon_of
from benchmarks.diff.kinds import KINDS
from benchmarks.diff.new import different, same
from benchmarks.diff.new.models import Raw, Torch, Translator
from benchmarks.diff.new.same import BOTH, both_canon
from benchmarks.diff.plants import Case

SEED = 29


def _options(model: Any) -> Any:
    return model.opt if hasattr(model, "opt") else model.backbone.opt


def difference(case: Case) -> tuple[float, float]:
    """Largest difference of the outputs, and of the gradients in the first table, relative to the largest."""
    with exact():
        (a, batch), (b, _) = case.a(), case.b()  # type: ignore[operator]
        if case.name.startswith("fresh: "):
            if case.architecture == "translator":
                canon = both_canon(BOTH, lambda seed: canon_of(BOTH, SEED + seed))
            else:
                canon = canon_of(_options(a), SEED)
            a.fill(canon)
            b.fill(canon)
        outputs = [output(model, batch) for model in (a, b)]
        slopes = [_slope(model, y) for model, y in zip((a, b), outputs, strict=True)]
        forward, backward = (float((x - y).abs().max() / x.abs().max()) for x, y in (outputs, slopes))
        return forward, backward


def _slope(model: Any, y: torch.Tensor) -> torch.Tensor:
    """The gradient in the table of tokens."""
    model = getattr(model, "backbone", model)
    if hasattr(model, "get_input_embeddings"):
        table = model.get_input_embeddings().weight
    elif isinstance(model, Raw):
        table = model.vocabulary
    elif isinstance(model, Torch):
        table = model.emb.weight
    else:
        table = (model.shared if isinstance(model, Translator) else model.embed).table()
    return torch.autograd.grad(y.square().mean(), table)[0]


def laws(case: Case) -> float:
    """Largest difference of the deviations of both sides' fresh weights, relative."""
    sums = []
    for build in (case.a, case.b):
        torch.manual_seed(3)
        made = build()[0]  # type: ignore[operator]
        sums.append(sum(float(p.detach().double().square().sum()) for p in made.parameters()))
    return abs(sums[0] / sums[1] - 1)


def is_right(case: Case) -> tuple[bool, float]:
    """Whether the two sides differ as the case says, and by how much."""
    forward, backward = difference(case)
    if case.truths:
        assert all(truth.kind in KINDS for truth in case.truths)
        return forward > 1e-6, forward
    size = max(forward, backward)
    if case.name.startswith("fresh: "):
        return size < 1e-9 and laws(case) < 0.05, size
    return size < 1e-9, size


if __name__ == "__main__":
    check([*different.cases(), *same.cases()], is_right)
