"""The predictors by name."""

from benchmarks.predictors.baselines import baselines, loss_after_steps
from benchmarks.predictors.critical_sharpness import critical_sharpness
from benchmarks.predictors.dyt_saturation import dyt_saturation
from benchmarks.predictors.gradient_norm import gradient_norm
from benchmarks.predictors.of_normscope import of_normscope, refined_normscope
from benchmarks.predictors.range_test import range_test
from benchmarks.predictors.rksp import rksp
from benchmarks.predictors.setting import Predictor
from benchmarks.predictors.sharpness import sharpness

CHEAP: tuple[Predictor, ...] = (baselines, gradient_norm, critical_sharpness, rksp, sharpness)
"""Predictors that need no training step."""

PREDICTORS: dict[str, Predictor] = {
    each.__name__: each
    for each in (*CHEAP, dyt_saturation, range_test, loss_after_steps, of_normscope, refined_normscope)
}
