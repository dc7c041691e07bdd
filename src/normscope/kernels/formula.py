"""The formula in PyTorch's own operations: the contract of all backends.

    s = α·x + dropout(branch)
    normed = N(s)·weight + bias
    stream = s if prenorm else normed

All three are computed in float32, or in float64 if x or branch has it. `normed` is rounded once, to branch's
dtype; `stream` is rounded once, to its own. The statistics are those of the unrounded s.

Shapes: … any, D features.
"""

import torch
from torch import Tensor
from torch.nn import functional

from normscope.kernels.form import AllGrads, Arrays, Form, Grads
from normscope.kernels.plain import is_plain


def forward(form: Form, arrays: Arrays, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """(normed, stream); both are one tensor if they hold the same values in the same dtype.

    Args:
        form: the settings.
        arrays: x, branch, weight, bias.
        keep: which features of the branch are kept, like branch; None keeps all.
    """
    x, branch, weight, bias = arrays
    s = summed(form, x, branch, keep)
    normed_wide = _normed(form, s, weight, bias)
    normed = as_dtype(normed_wide, form.branch_dtype)
    if form.stream_is_normed:
        return normed, normed
    return normed, as_dtype(s if form.prenorm else normed_wide, form.stream_dtype)


def summed(form: Form, x: Tensor, branch: Tensor, keep: Tensor | None) -> Tensor:
    """s = α·x + dropout(branch), unrounded."""
    x_wide = as_dtype(x, form.dtype)
    if keep is None:
        branch_wide = as_dtype(branch, form.dtype)
        if branch_wide is not branch and is_plain((x, branch)):
            return branch_wide.add_(x_wide, alpha=form.alpha)  # a copy: nobody else has it
        return torch.add(branch_wide, x_wide, alpha=form.alpha)
    kept_wide = as_dtype(torch.where(keep, branch, 0.0), form.dtype)
    return torch.add(x_wide if form.alpha == 1 else x_wide * form.alpha, kept_wide, alpha=form.kept_scale)


def _normed(form: Form, s: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    weight = None if weight is None else as_dtype(weight, form.dtype)
    bias = None if bias is None else as_dtype(bias, form.dtype)
    if form.norm == "layer":
        return functional.layer_norm(s, s.shape[-1:], weight, bias, form.eps)
    normed = functional.rms_norm(s, s.shape[-1:], weight, form.eps)
    return normed if bias is None else normed + bias


def backward(
    form: Form,
    s: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    keep: Tensor | None,
    grads: Grads,
    wanted: tuple[bool, bool] = (True, True),
) -> AllGrads:
    """Gradients of x, branch, weight and bias, by operations that have derivatives of their own.

    With ẑ = (s − mean)/σ and h = weight·ḡ, ḡ the gradient of normed:
    s̄ = (h − mean h − ẑ mean(h ẑ))/σ, for RMSNorm without the means of s and h. The stream's gradient is added
    to s̄ or, without `prenorm`, to ḡ.

    Args:
        form: the settings.
        s: the sum.
        weight, bias: gain and shift.
        keep: the mask of the forward.
        grads: gradients of normed and stream.
        wanted: whether the gradients of weight and bias are asked for.
    """
    grad, grad_stream = (None if each is None else each.to(s.dtype) for each in grads)
    if not form.prenorm:
        grad, grad_stream = _plus(grad, grad_stream), None
    grad_weight, grad_bias = None, None
    if grad is not None:
        through, grad_weight, grad_bias = _norm_backward(form, s, weight, bias, grad, wanted)
        grad_stream = _plus(through, grad_stream)
    if grad_stream is None:
        return None, None, None, None
    grad_x = grad_stream if form.alpha == 1 else grad_stream * form.alpha
    if keep is not None:
        grad_stream = torch.where(keep, grad_stream * form.kept_scale, 0.0)
    return grad_x.to(form.x_dtype), grad_stream.to(form.branch_dtype), grad_weight, grad_bias


def _norm_backward(
    form: Form,
    s: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    grad: Tensor,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of s, weight and bias."""
    centred = s - s.mean(-1, keepdim=True) if form.norm == "layer" else s
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + form.eps)
    unit = centred * inverse
    h = grad if weight is None else grad * weight.to(s.dtype)
    along = unit * (h * unit).mean(-1, keepdim=True)
    across = h - h.mean(-1, keepdim=True) if form.norm == "layer" else h
    grad_weight, grad_bias = None, None
    if weight is not None and wanted[0]:
        grad_weight = _over_rows(grad * unit).to(weight.dtype)
    if bias is not None and wanted[1]:
        grad_bias = _over_rows(grad).to(bias.dtype)
    return inverse * (across - along), grad_weight, grad_bias


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _over_rows(x: Tensor) -> Tensor:
    rows = tuple(range(x.dim() - 1))
    return x.sum(rows) if rows else x


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype; a call of `to` that changes nothing costs a microsecond."""
    return x if x.dtype == dtype else x.to(dtype)
