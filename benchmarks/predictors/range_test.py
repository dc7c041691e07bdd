"""Learning-rate range test (Smith 2015, arXiv:1506.01186): one run with a growing learning rate.

Smith raises the rate linearly over epochs, and takes the rate at which the accuracy slows or falls as the
largest. The form that is in use raises it exponentially over 100 steps, to 10, and looks at the smoothed
loss. `normscope.forecast.range_test` runs that of pytorch-lr-finder: each smoothed loss is 0.05 of the loss
and 0.95 of the last smoothed one, the run ends at 5 times the lowest, and the rate to use is that of the
steepest fall. It starts at 1e-7, as in fastai. The largest rate is where the smoothed loss is lowest, and, as
a variant, where it diverges (5 times the lowest, or the end of the ramp).

Read: summaries and a quotation of the paper's section 3.3; the code of pytorch-lr-finder, and in part that
of fastai 1.
"""

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.predictors.setting import Cost, NotMeasuredError, Prediction, Setting
from normscope.forecast.range_test import PUBLISHED, Ramp
from normscope.forecast.range_test import range_test as ramp_of

SKIPPED = (10, 5)
"""Steps at the start and the end that are not looked at for the steepest fall, as in pytorch-lr-finder."""


def steepest(found: Ramp) -> float:
    """Learning rate of the steepest fall of the smoothed loss over its logarithm."""
    first, end = SKIPPED[0], len(found.losses) - SKIPPED[1]
    if end - first < 2:
        return found.turns
    return found.rates[first + int(np.argmin(np.gradient(np.array(found.losses[first:end]))))]


def range_test(setting: Setting) -> list[Prediction]:
    """log₂ of the learning rate over the test's largest one; the optimiser is the recipe's."""
    found = ramp_of(setting.subject, setting.recipe, test=PUBLISHED)
    if found is None:
        raise NotMeasuredError("no parameter gets a gradient")
    cost = Cost(steps=len(found.rates))
    return [
        _prediction("range test: loss turns", found.turns, steepest(found), setting.rates, cost),
        _prediction("range test: loss diverges", found.diverged, steepest(found), setting.rates, cost),
    ]


def _prediction(name: str, largest: float, best: float, rates: Sequence[float], cost: Cost) -> Prediction:
    return Prediction(name, tuple(math.log2(rate / largest) for rate in rates), cost, largest, best)
