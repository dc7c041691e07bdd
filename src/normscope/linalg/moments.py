"""Figures of one measure of log σ, as `density.py` takes them of Gauss rules: mean, spread, rank shares.

A rank of n singular values is n times its share here. The kernel's weight lowers the shares; mean and spread
are of what is outside it. Source of the effective rank: Roy & Vetterli 2007.
"""

from math import nan, sqrt

import numpy as np

from normscope.linalg.quadrature import Rule


def mean_log(rule: Rule) -> float:
    """Mean of log σ outside the kernel; nan where all is kernel."""
    return float(rule.weights @ rule.nodes / rule.weights.sum()) if len(rule.nodes) else nan


def std_log(rule: Rule) -> float:
    """Its standard deviation."""
    if not len(rule.nodes):
        return nan
    return sqrt(rule.weights @ (rule.nodes - mean_log(rule)) ** 2 / rule.weights.sum())


def effective_share(rule: Rule) -> float:
    """exp(H)/n for H the entropy of σ_i/Σσ: log n + log⟨σ⟩ − ⟨σ log σ⟩/⟨σ⟩."""
    if not len(rule.nodes):
        return 0.0
    logs = rule.nodes - rule.nodes[-1]
    weighted = rule.weights * np.exp(logs)
    return float(weighted.sum() * np.exp(-(weighted @ logs) / weighted.sum()))


def participation_share(rule: Rule) -> float:
    """(Σσ²)²/(n Σσ⁴)."""
    if not len(rule.nodes):
        return 0.0
    squares = np.exp(2 * (rule.nodes - rule.nodes[-1]))
    return float((rule.weights @ squares) ** 2 / (rule.weights @ squares**2))


def stable_share(rule: Rule) -> float:
    """Σσ²/(n σ_max²)."""
    return float(rule.weights @ np.exp(2 * (rule.nodes - rule.nodes[-1]))) if len(rule.nodes) else 0.0


def round_off_log(rule: Rule, error: float) -> float:
    """Error of the mean log σ where each σ is off by `error` σ_max."""
    if not len(rule.nodes):
        return 0.0
    share = rule.weights / rule.weights.sum()
    return float(np.minimum(error * np.exp(rule.nodes[-1] - rule.nodes), 1e3) @ share)
