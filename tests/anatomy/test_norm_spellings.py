"""Tests that every spelling of a norm reads as the same norm, before the branch and on the stream."""

from collections.abc import Callable, Mapping

import pytest
import torch
from norm_spellings import (
    EPS,
    GAINS,
    L2,
    LAYER,
    LAYER_WITHOUT_EPS,
    MEAN_SQUARES,
    MEANS,
    RMS_WITHOUT_EPS,
    ROOTS,
    VARIANCES,
    D,
    Formula,
)
from torch import Tensor, nn

from normscope.anatomy import read_anatomy

Gain = Callable[[Tensor, Tensor], Tensor]


class Spelt(nn.Module):
    """A stack of feed-forwards, each with a norm in a spelling of its own."""

    def __init__(self, formulas: Mapping[str, Formula], post: bool, gain: Gain) -> None:
        super().__init__()
        self.formulas, self.post, self.gain = formulas, post, gain
        self.tokens = nn.Embedding(8, D)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 24), nn.GELU(), nn.Linear(24, D)) for _ in formulas
        )
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(D)) for _ in formulas)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for formula, layer, weight in zip(self.formulas.values(), self.layers, self.gains, strict=True):
            if self.post:
                x = self.gain(formula(x + layer(x)), weight)
            else:
                x = x + layer(self.gain(formula(x), weight))
        return x


def assert_read(
    formulas: Mapping[str, Formula],
    post: bool,
    kind: str,
    eps: float | None,
    gain: Gain = GAINS["after"][0],
    offset: float = 0.0,
) -> None:
    """Assert that all formulas read as the same norm with a weight."""
    anatomy = read_anatomy(Spelt(formulas, post, gain), torch.randint(0, 8, (2, 6)))
    assert anatomy.unread == ()
    found = {
        name: [(branch.placement, n.kind, n.eps, n.weight, n.weight_offset) for n in branch.norms]
        for name, branch in zip(formulas, anatomy.branches, strict=True)
    }
    about = None if eps is None else pytest.approx(eps, rel=1e-3)
    placement = "post" if post else "pre"
    assert found == {
        name: [(placement, kind, about, f"gains.{i}", offset)] for i, name in enumerate(formulas)
    }


placements = pytest.mark.parametrize("post", [False, True], ids=["pre", "post"])


@placements
@pytest.mark.parametrize("root", ROOTS)
def test_every_mean_square_under_every_root_is_an_rmsnorm(root: str, post: bool) -> None:
    names = [*MEAN_SQUARES][([*ROOTS].index(root) + post) % 2 :: 2]  # the other half in the other placement
    formulas = {name: lambda x, f=MEAN_SQUARES[name]: ROOTS[root](x, f(x)) for name in names}
    assert_read(formulas, post, "rmsnorm", EPS)


@placements
@pytest.mark.parametrize("mean", MEANS)
def test_every_variance_about_every_mean_is_a_layernorm(mean: str, post: bool) -> None:
    def spelt(root: str, variance: Callable[[Tensor, Tensor], Tensor]) -> Formula:
        return lambda x: ROOTS[root](x - MEANS[mean](x), variance(x, MEANS[mean](x)))

    formulas = {
        f"{name} {root}": spelt(root, variance)
        for i, (name, variance) in enumerate(VARIANCES.items())
        for root in [*ROOTS][(i + [*MEANS].index(mean) + post) % 3 :: 3]  # three means have every pair
    }
    assert_read(formulas, post, "layernorm", EPS)


@placements
def test_whole_norms_read_by_their_kind_and_epsilon(post: bool) -> None:
    assert_read(LAYER, post, "layernorm", EPS)
    assert_read(LAYER_WITHOUT_EPS, post, "layernorm", None)
    assert_read(RMS_WITHOUT_EPS, post, "rmsnorm", None)
    assert_read({n: f for n, (f, eps) in L2.items() if eps is None}, post, "l2norm", None)
    assert_read({n: f for n, (f, eps) in L2.items() if eps is not None}, post, "l2norm", EPS)


@placements
@pytest.mark.parametrize("gain", GAINS)
def test_every_gain_has_its_weight_and_offset(gain: str, post: bool) -> None:
    spelling, offset = GAINS[gain]
    rms: dict[str, Formula] = {n: lambda x, r=r: r(x, MEAN_SQUARES["einsum"](x)) for n, r in ROOTS.items()}
    assert_read(rms, post, "rmsnorm", EPS, spelling, offset)
    assert_read(RMS_WITHOUT_EPS, post, "rmsnorm", None, spelling, offset)
    assert_read(LAYER, post, "layernorm", EPS, spelling, offset)


def test_without_a_gain_there_is_no_weight() -> None:
    model = Spelt(MEAN_SQUARES, False, lambda y, weight: y)
    model.formulas = {n: lambda x, f=f: ROOTS["rsqrt"](x, f(x)) for n, f in MEAN_SQUARES.items()}
    norms = [n for b in read_anatomy(model, torch.randint(0, 8, (2, 6))).branches for n in b.norms]
    assert [(n.kind, n.weight) for n in norms] == len(MEAN_SQUARES) * [("rmsnorm", None)]
