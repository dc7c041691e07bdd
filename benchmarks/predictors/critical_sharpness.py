"""Critical sharpness (Kalra et al. 2026, arXiv:2601.16979): the rate at which a step raises the loss.

η_c = min {η > 0 : L(θ − ηΔθ) > L(θ)} along the optimiser's update Δθ, and λ_c = 2/η_c, as
`normscope.probes.next_step` measures it for a check.

Read: the source of the paper and the code (facebookresearch/scalable-curvature).
"""

import math

from benchmarks.predictors.setting import Cost, Prediction, Setting
from normscope.probes.next_step import at_start, critical_rate_of, loss_gradients


def critical_sharpness(setting: Setting) -> list[Prediction]:
    """log₂(η/η_c) at the initial weights, on the first batch; the first guess is the middle rate."""
    subject, guess = setting.subject, setting.rates[len(setting.rates) // 2]
    with at_start(subject) as model:
        first = loss_gradients(subject, model)
        found = critical_rate_of(subject, model, setting.recipe, first, guess=guess)
    scores = tuple(math.log2(rate / found.rate) for rate in setting.rates)
    facts = {"critical sharpness": 2 / found.rate}
    cost = Cost(forwards=found.evaluations, gradients=1)
    return [Prediction("critical sharpness", scores, cost, found.rate, None, facts)]
