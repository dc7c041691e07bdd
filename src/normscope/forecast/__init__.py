"""Forecasting: train a copy of the model for a few steps and predict the run from them.

`one_rate` and `ladder` (several learning rates at once) train copies of the model. `watch` steps them and
measures between steps; `evaluator` takes one measurement, in eval mode on a fixed batch: loss, token
diversity, gradients. `rule` decides by the `margins` of the measurements, `thresholds` has its limits,
`certainty` says how surely, and `divergence` how likely the run is to diverge, for a refined ladder with a
`range_test`. `stopping` ends trials that are decided. `best_rate` names the rate to use, `warmup` the warm-up
that it needs, `scaling` the rate of a larger model; `loss_to_beat` finds the loss to beat, from the `targets`
or as a `baseline`, and `batch_entropy` that of one batch. `longer` says which longer trials are made.
`record` holds the types of the results. The evidence is in docs/forecast-evidence.md.
"""

from normscope.forecast.baseline import best_constant
from normscope.forecast.divergence import divergence_risk
from normscope.forecast.ladder import forecast_ladder, rates_around
from normscope.forecast.longer import LongerTrials, longer_trials, with_caveat
from normscope.forecast.loss_to_beat import lacks_baseline, with_baseline
from normscope.forecast.one_rate import forecast, forecast_measurements
from normscope.forecast.record import (
    AtScale,
    BestRate,
    Forecast,
    ForecastInterrupted,
    ForecastStep,
    LadderForecast,
    LadderInterrupted,
    ScaledRate,
)
from normscope.forecast.targets import (
    NoTargetsError,
    UnknownEntropyError,
    mean_cross_entropy,
    targets_entropy,
)
from normscope.option_values import LADDER_STEPS, REFINED_STEPS

__all__ = [
    "LADDER_STEPS",
    "REFINED_STEPS",
    "AtScale",
    "BestRate",
    "Forecast",
    "ForecastInterrupted",
    "ForecastStep",
    "LadderForecast",
    "LadderInterrupted",
    "LongerTrials",
    "NoTargetsError",
    "ScaledRate",
    "UnknownEntropyError",
    "best_constant",
    "divergence_risk",
    "forecast",
    "forecast_ladder",
    "forecast_measurements",
    "lacks_baseline",
    "longer_trials",
    "mean_cross_entropy",
    "rates_around",
    "targets_entropy",
    "with_baseline",
    "with_caveat",
]
