"""Closed forms of the L2-norm, of softmax rows and of activations against autograd, to the extremes."""

from dataclasses import dataclass
from math import exp

import pytest
import torch
from drawn_maps import drawn
from torch import Tensor
from torch.nn import functional as F

from normscope.linalg import (
    ACTIVATION_GAINS,
    activation_gain,
    activation_jacobian,
    activation_kernel,
    activation_singular_values,
    attention_row_jacobian,
    l2_norm_jacobian,
    l2_norm_kernel,
    l2_norm_singular_values,
    softmax_jacobian,
    softmax_kernel,
    softmax_norm_bound,
    softmax_singular_values,
)
from normscope.nn.feed_forward import ACTIVATIONS

F64 = torch.float64
HIDDEN = -torch.inf


def autograd(f, z: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(f, z)


@dataclass(frozen=True)
class Form:
    """One closed form at one point: what it says and the function it is of."""

    jacobian: Tensor
    values: Tensor
    kernel: Tensor  # (d, r) orthonormal, both sides
    f: object
    z: Tensor


def units(which: Tensor) -> Tensor:
    """The e_i (d, r) where `which` (d,) is true."""
    return torch.eye(len(which), dtype=F64)[:, which]


def l2(z: Tensor, eps: float) -> Form:
    kernel = l2_norm_kernel(z, eps=eps)
    return Form(
        l2_norm_jacobian(z, eps=eps),
        l2_norm_singular_values(z, eps=eps),
        kernel[:, kernel.any(0)],
        lambda x: F.normalize(x, dim=-1, eps=eps),
        z,
    )


def softmax(z: Tensor, scale: float) -> Form:
    basis, masked = softmax_kernel(z)
    return Form(
        softmax_jacobian(z, scale=scale),
        softmax_singular_values(z, scale=scale),
        torch.cat((basis, units(masked)), 1),
        lambda x: (scale * x).softmax(-1),
        z,
    )


def activation(z: Tensor, name: str) -> Form:
    return Form(
        activation_jacobian(z, name),
        activation_singular_values(z, name),
        units(activation_kernel(z, name)),
        ACTIVATIONS[name],
        z,
    )


Z = drawn(9, seed=3)
MASKED = Z.masked_fill(torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 0]).bool(), HIDDEN)
LOGITS = {
    "random": Z,
    "equal": torch.zeros(9, dtype=F64),
    "far from zero": Z + 1e4,
    "saturated": torch.cat((torch.tensor([40.0], dtype=F64), Z)),
    "one-hot": torch.cat((torch.tensor([1e4], dtype=F64), Z)),
    "two ties": torch.tensor([50.0, 50.0, 0.0, -3.0], dtype=F64),
    "masked": MASKED,
    "one visible": torch.tensor([HIDDEN, 0.3, HIDDEN], dtype=F64),
    "one alone": torch.tensor([0.3], dtype=F64),
}
FAR = torch.tensor([0.0, 1e-30, -1e-30, 30.0, -30.0, 1e5, -1e5, 1e100, -1e100], dtype=F64)
ENTRIES = torch.cat((4 * Z, FAR))
UNDERFLOWING = ("softmax one-hot", "softmax two ties")
"""Rows whose small values float64 has not, beside the large ones: neither zero nor to be seen."""

FORMS = (
    {f"l2 {size:g} {eps:g}": l2(size * Z, eps) for size in (1e-13, 1.0, 1e8) for eps in (0.0, 1e-12, 0.5)}
    | {f"l2 at the edge {x:g}": l2(torch.tensor([x, 0.0, 0.0], dtype=F64), 0.5) for x in (0.49, 0.5, 0.6)}
    | {f"softmax {name} {c}": softmax(z, c) for name, z in LOGITS.items() for c in (1.0, 0.25, 3.0)}
    | {name: activation(ENTRIES, name) for name in ACTIVATION_GAINS}
)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_matrix_is_the_one_autograd_gives(form: Form) -> None:
    expected = autograd(form.f, form.z).nan_to_num(0.0)  # a masked row of autograd's may be 0·inf
    scale = float(expected.abs().max())
    torch.testing.assert_close(form.jacobian, expected, rtol=1e-12, atol=1e-14 * max(scale, 1e-300) + 1e-16)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_singular_values_are_those_of_the_matrix(form: Form) -> None:
    expected = torch.linalg.svdvals(form.jacobian)
    torch.testing.assert_close(form.values, expected, rtol=1e-12, atol=1e-14 * float(expected[0]))
    assert bool((form.values.diff() <= 0).all())


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_kernel_is_null_on_both_sides_and_is_all_of_it(form: Form) -> None:
    jacobian, kernel = form.jacobian, form.kernel
    torch.testing.assert_close(kernel.T @ kernel, torch.eye(kernel.shape[1], dtype=F64), rtol=0, atol=1e-14)
    size = float(torch.linalg.matrix_norm(jacobian, 2))
    for side in (jacobian, jacobian.T):
        assert float((side @ kernel).abs().max() if kernel.numel() else 0) <= 1e-14 * size


@pytest.mark.parametrize("name", [name for name in FORMS if not name.startswith(UNDERFLOWING)])
def test_rank_and_kernel_make_up_the_space(name: str) -> None:
    form = FORMS[name]
    floor = 0.0 if name in ACTIVATION_GAINS else 1e-24 * float(form.values[0])  # a diagonal has no round-off
    rank = int((form.values > floor).sum())
    assert rank + form.kernel.shape[1] == len(form.z)


def test_a_saturated_row_keeps_its_relative_accuracy() -> None:
    for gap in (1.0, 40.0, 300.0):  # T = 2: σ = 2 p₁p₂; float64 has no 1 − e^(−40)
        z = torch.tensor([gap, 0.0], dtype=F64)
        expected = 2 * exp(-gap) / (1 + exp(-gap)) ** 2
        assert float(softmax_singular_values(z)[0]) == pytest.approx(expected, rel=1e-13, abs=0)
        assert float(softmax_jacobian(z)[0, 0]) == pytest.approx(expected / 2, rel=1e-13, abs=0)
        moved = attention_row_jacobian(z, torch.tensor([[1e3], [1e3 + 1]], dtype=F64))
        assert moved.flatten().tolist() == pytest.approx([-expected / 2, expected / 2], rel=1e-12, abs=0)


@pytest.mark.parametrize("name", LOGITS)
def test_values_of_a_softmax_interlace_with_its_row_and_keep_to_the_bound(name: str) -> None:
    z = LOGITS[name]
    for scale in (1.0, 0.25):
        bound = float(softmax_norm_bound(z, scale=scale))
        assert float(softmax_singular_values(z, scale=scale)[0]) <= bound * (1 + 1e-14)
        assert bound <= scale / 2 + 1e-15
    p = z.softmax(-1).sort(descending=True).values
    values = softmax_singular_values(z)
    slack = 1e-15
    assert bool((values[:-1] <= p[:-1] + slack).all())
    assert bool((values[:-1] >= p[1:] - slack).all())


def test_equal_logits_have_equal_values() -> None:
    values = softmax_singular_values(torch.zeros(2, 7, dtype=F64), scale=3.0)
    expected = torch.tensor([3 / 7] * 6 + [0.0], dtype=F64).expand(2, 7)
    torch.testing.assert_close(values, expected, atol=1e-15, rtol=0)


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("name", LOGITS)
def test_one_output_of_attention_by_its_logits(name: str, scale: float) -> None:
    z = LOGITS[name]
    values = drawn(len(z), 5, seed=8) + 3
    found = attention_row_jacobian(z, values, scale=scale)
    expected = autograd(lambda x: (scale * x).softmax(-1) @ values, z).nan_to_num(0.0)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-14)
    basis, masked = softmax_kernel(z)
    assert float((found @ basis).abs().max()) <= 1e-14
    assert float(found[:, masked].abs().sum()) == 0
    same = attention_row_jacobian(z, values[:1].expand(len(z), 5), scale=scale)
    assert float(same.abs().max()) == 0


def test_leading_axes_are_queries() -> None:
    z, values = drawn(2, 3, 6, seed=1), drawn(2, 3, 6, 4, seed=2)
    for i, j in ((0, 0), (1, 2)):
        for whole, one in (
            (softmax_jacobian(z), softmax_jacobian(z[i, j])),
            (softmax_singular_values(z), softmax_singular_values(z[i, j])),
            (softmax_norm_bound(z), softmax_norm_bound(z[i, j])),
            (softmax_kernel(z)[0], softmax_kernel(z[i, j])[0]),
            (attention_row_jacobian(z, values), attention_row_jacobian(z[i, j], values[i, j])),
            (l2_norm_jacobian(z), l2_norm_jacobian(z[i, j])),
            (l2_norm_singular_values(z), l2_norm_singular_values(z[i, j])),
            (activation_jacobian(z, "gelu"), activation_jacobian(z[i, j], "gelu")),
        ):
            torch.testing.assert_close(whole[i, j], one)


@pytest.mark.parametrize("name", ACTIVATION_GAINS)
def test_activations_have_the_zeros_and_the_range_that_are_stated(name: str) -> None:
    least, largest, zero = {
        "gelu": (-0.129, 1.129, -0.7518),
        "gelu-tanh": (-0.129, 1.129, -0.7525),
        "silu": (-0.0998, 1.0998, -1.2785),
        "relu": (0.0, 1.0, -1.0),
    }[name]
    gain = activation_gain(torch.linspace(-20, 20, 40001, dtype=F64), name)
    assert (float(gain.min()), float(gain.max())) == pytest.approx((least, largest), abs=1e-4)
    assert float(activation_gain(torch.tensor(zero, dtype=F64), name)) == pytest.approx(0, abs=1e-4)


def test_far_on_the_left_a_gelu_keeps_its_digits() -> None:
    z = torch.tensor([-12.0], dtype=F64)  # Mills' ratio: Φ(−x) = N(x)/x (1 − 1/x² + 3/x⁴ − …)
    density = exp(-72) / (2 * torch.pi) ** 0.5
    series = sum(c / 12 ** (2 * i) for i, c in enumerate((1, -1, 3, -15, 105, -945, 10395)))
    assert float(activation_gain(z, "gelu")) == pytest.approx(density * (series / 12 - 12), rel=1e-9, abs=0)
    for name in ("gelu", "gelu-tanh", "silu"):  # where z² is too large for float64
        assert activation_gain(torch.tensor([-1e200, 1e200], dtype=F64), name).tolist() == [0.0, 1.0]
    silu = torch.tensor([-40.0], dtype=F64)
    assert float(activation_gain(silu, "silu")) == pytest.approx(-39 * exp(-40), rel=1e-12, abs=0)


def test_every_elementwise_activation_of_our_models_has_a_closed_form() -> None:
    assert set(ACTIVATIONS) == set(ACTIVATION_GAINS)


def test_what_has_no_derivative_is_refused() -> None:
    with pytest.raises(ValueError, match="masked throughout"):
        softmax_kernel(torch.full((2, 3), HIDDEN))
    with pytest.raises(ValueError, match="masked throughout"):
        softmax_jacobian(torch.full((3,), HIDDEN))
    with pytest.raises(ValueError, match="scale=-1"):
        softmax_jacobian(torch.zeros(3), scale=-1.0)
    with pytest.raises(ValueError, match='activation="swiglu": expected one of gelu'):
        activation_gain(torch.zeros(3), "swiglu")
