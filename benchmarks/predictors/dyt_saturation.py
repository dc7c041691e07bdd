"""Saturation of DyT (Verma 2026, arXiv:2604.23434): the share of |a x| > 2 over all inputs of tanh(a x).

The paper measures it after 500 steps, and says with it whether DyT gives a lower loss than LayerNorm (more
saturation: DyT helps); within Llama with DyT, more saturation goes with collapse. Only the second says
something of failures, so more saturation scores higher. Runs of the truth have 300 steps: it is measured at
the initial weights and after 36 steps at each learning rate. Models without DyT are not measured.

Read: the abstract, the first page, and the code (lucky-verma/dyt-composition-study), which says of itself
that saturation is a measurement and no rule for choosing.
"""

import torch
from torch import nn

from benchmarks.predictors.setting import Cost, NotMeasuredError, Prediction, Setting, trained_stack
from normscope.anatomy import Norm, capture, measuring, named_parameters

THRESHOLD, STEPS = 2.0, 36


def dyt_saturation(setting: Setting) -> list[Prediction]:
    """Saturation at the start, and after `STEPS` steps at each learning rate."""
    norms = tuple({norm.input: norm for norm in _norms(setting) if norm.kind == "dyt"}.values())
    if not norms:
        raise NotMeasuredError("no DyT")
    first = saturation(setting, setting.subject.model, norms)
    _, later = trained_stack(setting, STEPS, lambda model: saturation(setting, model, norms))
    count = len(setting.rates)
    return [
        Prediction("DyT saturation at the start", (first,) * count, Cost(forwards=1)),
        Prediction(
            f"DyT saturation after {STEPS} steps", tuple(later), Cost(forwards=count, steps=STEPS * count)
        ),
    ]


def _norms(setting: Setting) -> list[Norm]:
    """The norms of all branches and stacks."""
    stacks = setting.anatomy.stacks
    found = [norm for stack in stacks for branch in stack.branches for norm in branch.norms]
    return found + [stack.final_norm for stack in stacks if stack.final_norm is not None]


@torch.no_grad()
def saturation(setting: Setting, model: nn.Module, norms: tuple[Norm, ...]) -> float:
    """Mean over the norms of the share of inputs beyond the threshold, on the first batch."""
    with measuring(model):
        _, seen = capture(model, lambda: setting.subject.forward(model=model), [n.input for n in norms])
    weights = dict(named_parameters(model))
    shares = []
    for norm in norms:
        own = [p for name, p in weights.items() if name.startswith(f"{norm.path}.") and p.numel() == 1]
        if len(own) == 1 and norm.input in seen:
            shares.append(float(((own[0] * seen[norm.input]).abs() > THRESHOLD).double().mean()))
    if not shares:
        raise NotMeasuredError("no DyT whose a is one number")
    return sum(shares) / len(shares)
