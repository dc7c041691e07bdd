"""Dense spectra of small Jacobians, and of ∂(one token out)/∂(the same token in)."""

from dataclasses import replace
from math import inf

import numpy as np

from normscope.anatomy import Block, Stack
from normscope.linalg import (
    TangentError,
    condition_number,
    dense,
    effective_rank,
    numerical_rank,
    restricted_jacobian,
    singular_values,
    stable_rank,
    token_indices,
)
from normscope.probes.jacobian.budget import Budget
from normscope.probes.jacobian.layers import kernel_of
from normscope.probes.jacobian.workspace import Workspace, ends_of, guarded, log10, site_of
from normscope.probes.measurement import Measurement, not_measured

WHOLE, TOKEN = "whole spectra", "one token"
RANK_TOLERANCE = 1e-5  # singular values above this share of the largest count
PLAIN = 10.0  # least gap, as a ratio of singular values, that shows a rank

QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
"""Shares of the singular values at which the distribution of log σ is given."""

BATCHED = 0.5
"""Cost of one of many batched VJPs, in forwards, with its share of the SVD; measured at T·d = 512: 0.4."""

LARGEST_FEW = "jacobian/top-singular-values"
NUM_TOP = 20

TOKEN_VALUES, TOKEN_RANK, TOKEN_CONDITION = (
    f"jacobian/token-{name}" for name in ("singular-values", "rank", "condition")
)


def whole_rows(workspace: Workspace, part: Block | Stack, price: float) -> list[Measurement]:
    """Figures from all singular values of a block's or stack's Jacobian."""
    with workspace.spending.fixed(WHOLE, price, Budget.DEEP):
        values = singular_values(dense(workspace.ends(part)))
    kernel = kernel_of(workspace, part)
    how = f"dense SVD; {workspace.conditions}"
    return spectrum_rows(site_of(part), values, kernel.dimension if kernel else 0, how)


def token_rows(workspace: Workspace, part: Block | Stack) -> list[Measurement]:
    """Spectrum of the last token with the other tokens' entries fixed, by batched VJPs of the sequence."""
    site = site_of(part)

    def measure() -> list[Measurement]:
        widths, tokens = _sizes(workspace, part)
        with workspace.spending.fixed(TOKEN, BATCHED * widths[1] * workspace.share(part), Budget.DEEP):
            last_in, last_out = (token_indices(tokens - 1, width=width) for width in widths)
            values = singular_values(restricted_jacobian(workspace.ends(part), last_out, last_in))
        kernel = kernel_of(workspace, part)
        null = kernel.dimension // tokens if kernel else 0
        how = f"dense SVD; the last of {tokens} tokens, the others' entries fixed, {workspace.conditions}"
        ranked = {row.quantity: row for row in ranked_rows(site, values, null, how)}
        return [
            Measurement(TOKEN_VALUES, site, tuple(map(float, values)), how=how),
            replace(ranked["jacobian/rank"], quantity=TOKEN_RANK),
            replace(ranked["jacobian/condition"], quantity=TOKEN_CONDITION),
        ]

    return guarded(workspace, (TOKEN_VALUES, TOKEN_RANK, TOKEN_CONDITION), site, measure)


def _sizes(workspace: Workspace, part: Block | Stack) -> tuple[tuple[int, int], int]:
    """Widths d at the entry and the exit of `part`, and T."""
    tensors = workspace.graph.tensors
    if any(site not in tensors for site in ends_of(part)):
        raise TangentError("this forward did not compute its entry or its exit")
    entry, end = (tensors[site] for site in ends_of(part))
    counts = {tensor.numel() // tensor.shape[-1] for tensor in (entry, end)}
    if len(counts) > 1 or any(tensor.ndim > 3 and tensor.shape[0] > 1 for tensor in (entry, end)):
        raise TangentError(
            f"no axis of tokens in a stream of shape {tuple(entry.shape)} to {tuple(end.shape)}"
        )
    return (entry.shape[-1], end.shape[-1]), counts.pop()


def spectrum_rows(site: str, values: np.ndarray, null: int, how: str) -> list[Measurement]:
    """Figures from all singular values (k,), descending; `null` is the dimension of the known kernel.

    "Non-zero" and κ use the complement of the kernel: the values that count for the rank.
    """
    return [
        Measurement("jacobian/sigma-min", site, float(values[-1]), how=how),
        Measurement("jacobian/effective-rank", site, effective_rank(values), how=how),
        Measurement("jacobian/stable-rank", site, stable_rank(values), how=how),
        Measurement("jacobian/log-sigma", site, _quantiles(values), "log10", f"quantiles; {how}"),
        Measurement(LARGEST_FEW, site, tuple(map(float, values[:NUM_TOP])), how=how),
        *ranked_rows(site, values, null, how),
    ]


def ranked_rows(site: str, values: np.ndarray, null: int, how: str) -> list[Measurement]:
    """Rank, the least value that counts, and κ: where the kernel begins at a gap."""
    rank, gap, where = rank_of(values, null)
    quantities = tuple(f"jacobian/{name}" for name in ("rank", "sigma-min-nonzero", "condition"))
    if rank == 0:
        return [Measurement(quantities[0], site, 0.0, how=how)] + [
            not_measured(quantity, site, "the map is zero") for quantity in quantities[1:]
        ]
    if gap < PLAIN:
        reason = f"no gap in the values around {RANK_TOLERANCE:g} σ₁: none is {PLAIN:g} times the next"
        return [not_measured(quantity, site, reason) for quantity in quantities]
    counted = f"{where}, gap {gap:.3g}; {how}"
    figures = (float(rank), float(values[rank - 1]), condition_number(values, rank=rank))
    return [
        Measurement(quantity, site, figure, how=counted)
        for quantity, figure in zip(quantities, figures, strict=True)
    ]


def rank_of(values: np.ndarray, null: int) -> tuple[int, float, str]:
    """Rank, gap and how: the complement of the known kernel where a gap shows it, else by tolerance."""
    known = len(values) - null
    if null and known > 0 and values[known - 1] > PLAIN * values[known]:
        gap = float(values[known - 1] / values[known]) if values[known] else inf
        return known, gap, f"less the {null} directions of a norm's kernel"
    return *numerical_rank(values, RANK_TOLERANCE), f"σ > {RANK_TOLERANCE:g} σ₁"


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    """log₁₀ σ at `QUANTILES`, −inf of zeros."""
    return tuple(log10(float(value)) for value in np.quantile(values, QUANTILES, method="lower"))
