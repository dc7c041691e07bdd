"""The norm of all gradients together on the first batch, at the initial weights.

It is the baseline "initial gradient norm" of arXiv:2602.22988, table 2.
"""

import torch

from benchmarks.predictors.setting import Cost, Prediction, Setting
from normscope.probes.next_step import at_start, loss_gradients


def gradient_norm(setting: Setting) -> list[Prediction]:
    """The norm; it does not depend on the learning rate."""
    with at_start(setting.subject) as model:
        _, _, gradients = loss_gradients(setting.subject, model)
    norm = float(torch.stack([g.double().norm() for g in gradients]).norm())
    return [Prediction("gradient norm at the start", (norm,) * len(setting.rates), Cost(gradients=1))]
