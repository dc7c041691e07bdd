"""Forwards of other packages: the calls that they take, and their arguments. The packages are stand-ins."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from kernel_laws import BF16, DEVICE, F32, Case, cotangents, needs_triton, results
from torch import Tensor

from normscope.errors import UsageError
from normscope.kernels.external import EXTERNAL

pytestmark = needs_triton


def norm_of(s: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_rms: bool) -> Tensor:
    if not is_rms:
        return torch.nn.functional.layer_norm(s, s.shape[-1:], weight, bias, eps)
    normed = torch.nn.functional.rms_norm(s, s.shape[-1:], weight, eps)
    return normed if bias is None else normed + bias


def layer_norm_fn(x, weight, bias, residual=None, eps=1e-6, prenorm=False, is_rms_norm=False):  # flash-attn
    assert prenorm
    s = x.float() + residual.float()
    return norm_of(s, weight, bias, eps, is_rms_norm).to(x.dtype), s.to(residual.dtype)


def rmsnorm(x, weight=None, bias=None, residual=None, residual_dtype=None, eps=1e-6, prenorm=False):  # QuACK
    assert prenorm
    s = x.float() + residual.float()
    return norm_of(s, weight, bias, eps, True).to(x.dtype), s.to(residual_dtype)


class LigerFusedAddRMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        assert (offset, casting_mode, in_place) == (0.0, "gemma", False)
        s = X + R
        return norm_of(s, W, None, eps, True), s


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    holders = {"flash-attn": layer_norm_fn, "quack": rmsnorm, "liger": LigerFusedAddRMSNormFunction}
    for name, held in holders.items():
        module: Any = ModuleType(EXTERNAL[name].module)
        setattr(module, held.__name__, held)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("normscope.kernels.external._is_installed", lambda package: True)


TAKEN = [
    ("flash-attn", Case(norm="layer")),
    ("flash-attn", Case(dtypes=(F32, BF16, F32), norm="rms")),
    ("quack", Case(dtypes=(F32, BF16, BF16), norm="rms")),
    ("liger", Case(norm="rms", gains=(True, False))),
]


@pytest.mark.parametrize(("backend", "case"), TAKEN, ids=str)
def test_values_and_gradients(backend: str, case: Case) -> None:
    inputs, grads = case.inputs(), cotangents(case)
    found = results(case, inputs, backend, grads)
    for value, right in zip(found, results(case, inputs, "eager", grads), strict=True):
        torch.testing.assert_close(value, right)


@pytest.mark.parametrize(
    ("backend", "case", "words"),
    [
        ("flash-attn", Case(alpha=2.0), "no α"),
        ("flash-attn", Case(prenorm=False), "no Post-LN"),
        ("quack", Case(norm="rms", drop=0.1), "no mask"),
        ("quack", Case(norm="rms", gains=(False, False)), "needs a weight"),
        ("flash-attn", Case(dtypes=(F32, F32, BF16)), "its stream has x's dtype"),
        ("quack", Case(), "only for RMSNorm"),
        ("liger", Case(norm="rms"), "no bias"),
        ("liger", Case(dtypes=(BF16, BF16, BF16), norm="rms", gains=(True, False)), "needs float32"),
    ],
    ids=str,
)
def test_calls_that_they_do_not_compute_are_refused(backend: str, case: Case, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        case.call(case.inputs(), backend)


@pytest.mark.parametrize("backend", EXTERNAL)
def test_a_missing_package_is_named(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscope.kernels.external._is_installed", lambda package: False)
    case = Case(norm="rms", gains=(True, False))
    with pytest.raises(UsageError, match=f"the package {EXTERNAL[backend].module.partition('.')[0]} is not"):
        case.call(case.inputs(), backend)


def test_they_are_chosen_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in EXTERNAL.values():
        monkeypatch.setattr(each, "call", None)
    case = Case((64, 32), norm="rms", gains=(True, False))
    x = [None if each is None else each.to(DEVICE) for each in case.inputs()]
    for backend in (None, "any"):
        case.call(x, backend)
