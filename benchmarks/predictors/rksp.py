"""Residual Koopman spectral profiling (Kim et al. 2026, arXiv:2602.22988): spectra of layers at the start.

For each layer, the states of N tokens before and after it, X and Y, are centred and whitened by the
covariance of X + εI (the same map for both); A = Ỹ X̃⁺ (dynamic mode decomposition). The score is the near-
unit mass, the share of eigenvalues with 0.9 ≤ |λ| ≤ 1.05, averaged over layers. N = 2048 and ε = 1e-5 as in
its appendix D; a layer is a whole block, tokens of all positions are samples, as in appendix D.3. All d
eigenvalues are used; the paper uses 32 of a randomised decomposition where d is 128 to 1024. Whether its
table of AUROCs leaves out the eigenvalues with a residual above 0.1 is not said: both are scored. Variants
of its table 2 are scored as well: the spectral radius, the condition number of the eigenvectors, and mass ×
log₁₀ of it.

Read: the whole text of the paper in a conversion of its HTML. Its code was not found.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
import torch
from torch import Tensor

from benchmarks.predictors.setting import Cost, NotMeasuredError, Prediction, Setting
from normscope.anatomy import Block, capture
from normscope.probes.next_step import at_start
from normscope.train import endless

SAMPLES, EPSILON = 2048, 1e-5
BELOW, ABOVE = 0.10, 0.05
RESIDUAL = 0.1


@dataclass(frozen=True)
class Spectrum:
    """The modes of one layer: eigenvalues, residuals (d,), and the condition number of the eigenvectors."""

    eigenvalues: np.ndarray
    residuals: np.ndarray
    condition: float

    def near_unit_mass(self, *, reliable: bool = False) -> float | None:
        """Share of eigenvalues near the unit circle; `reliable` takes those with a small residual."""
        sizes = np.abs(self.eigenvalues[self.residuals <= RESIDUAL] if reliable else self.eigenvalues)
        near = (sizes >= 1 - BELOW) & (sizes <= 1 + ABOVE)
        return float(near.mean()) if len(sizes) else None

    @property
    def radius(self) -> float:
        """The largest |λ|."""
        return float(np.abs(self.eigenvalues).max())


def whitened_dmd(x_ND: np.ndarray, y_ND: np.ndarray, epsilon: float = EPSILON) -> Spectrum:
    """The spectrum of A = Ỹ X̃⁺ from N pairs of states, in float64."""
    x_ND, y_ND = (states.astype(np.float64) - states.mean(0, dtype=np.float64) for states in (x_ND, y_ND))
    covariance = x_ND.T @ x_ND / (len(x_ND) - 1) + epsilon * np.eye(x_ND.shape[1])
    sizes, vectors = np.linalg.eigh(covariance)
    whiten = (vectors / np.sqrt(sizes)) @ vectors.T
    x_ND, y_ND = x_ND @ whiten, y_ND @ whiten
    a_DD = np.linalg.lstsq(x_ND, y_ND, rcond=None)[0].T
    eigenvalues, left, right = scipy.linalg.eig(a_DD, left=True, right=True)
    seen_ND = x_ND @ left.conj()
    misfit = np.linalg.norm(y_ND @ left.conj() - eigenvalues * seen_ND, axis=0)
    residuals = misfit / (np.linalg.norm(seen_ND, axis=0) + 1e-12)
    return Spectrum(eigenvalues, residuals, float(np.linalg.cond(right)))


def rksp(setting: Setting) -> list[Prediction]:
    """Scores that do not depend on the learning rate, from forwards of as many batches as N tokens need."""
    blocks = setting.anatomy.blocks
    if not blocks:
        raise NotMeasuredError("no residual stream was read")
    pairs, forwards = snapshots(setting, blocks)
    spectra = [whitened_dmd(x, y) for x, y in pairs]
    masses = [spectrum.near_unit_mass() for spectrum in spectra]
    reliable = [spectrum.near_unit_mass(reliable=True) for spectrum in spectra]
    mass, condition = _mean(masses), _mean([spectrum.condition for spectrum in spectra])
    figures = {
        "RKSP near-unit mass": mass,
        "RKSP near-unit mass, reliable modes": _mean(reliable),
        "RKSP spectral radius": _mean([spectrum.radius for spectrum in spectra]),
        "RKSP κ(V)": condition,
        "RKSP mass × log κ(V)": None if mass is None or not condition else mass * math.log10(condition),
    }
    cost = Cost(forwards=forwards)
    return [
        Prediction(name, (figure,) * len(setting.rates), cost)
        for name, figure in figures.items()
        if figure is not None
    ]


def _mean(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) / len(known) if known else None


def snapshots(setting: Setting, blocks: Sequence[Block]) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """States before and after each block, (N, d) each, and the number of forwards."""
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in blocks]
    sites = [site for block in blocks for site in (block.entry, block.exit)]
    batches, forwards = endless(setting.subject.batches), 0
    with at_start(setting.subject) as model:
        while any(sum(len(x) for x, _ in rows) < SAMPLES for rows in found):
            forwards += 1
            run = functools.partial(setting.subject.forward, next(batches), model)
            _, seen = capture(model, run, sites)
            for rows, block in zip(found, blocks, strict=True):
                rows.append(_pair(seen.get(block.entry), seen.get(block.exit), block))
    pairs = [tuple(torch.cat(side)[:SAMPLES].numpy() for side in zip(*rows, strict=True)) for rows in found]
    return [(x, y) for x, y in pairs], forwards


def _pair(entry: Tensor | None, leaving: Tensor | None, block: Block) -> tuple[Tensor, Tensor]:
    """Tokens of both sides as (tokens, d)."""
    if entry is None or leaving is None or entry.shape != leaving.shape:
        raise NotMeasuredError(f"the stream around {block.site} could not be paired")
    x, y = (states.detach().flatten(0, -2).float() for states in (entry, leaving))
    if not (torch.isfinite(x).all() and torch.isfinite(y).all()):
        raise NotMeasuredError(f"the stream around {block.site} is not finite")
    return x, y
