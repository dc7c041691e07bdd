"""`residual_norm`: residual add, dropout and norm in one call."""

import torch
from torch import Tensor
from torch.nn import functional

from normscope.kernels import checks, formula
from normscope.kernels.dispatch import Backend, kernel_for
from normscope.kernels.form import Arrays, Form, Norm
from normscope.kernels.function import fused
from normscope.kernels.masks import draw_mask
from normscope.kernels.plain import is_plain


def residual_norm(
    x: Tensor,
    branch: Tensor,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    norm: Norm = "layer",
    alpha: float = 1.0,
    dropout_p: float = 0.0,
    training: bool = True,
    generator: torch.Generator | None = None,
    prenorm: bool = True,
    stream_dtype: torch.dtype | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]:
    """(normed, stream) of a residual connection: s = α·x + dropout(branch), normed = N(s)·weight + bias.

    With `prenorm` the stream is s, and the next branch reads `normed` (Pre-LN). Without, the stream is the
    normed sum (Post-LN).

    Rounding: s, its statistics and the norm are computed in float32, or in float64 if x or branch has it. The
    statistics are those of the unrounded s. `normed` is rounded once, to branch's dtype, and the stream once,
    to its own. All backends keep this; they differ in the order of sums.

    First and second derivatives, forward mode and `vmap` are right with every backend. Third derivatives of
    LayerNorm are those of PyTorch's `layer_norm`, which are wrong in PyTorch 2.13. Backends other than
    "eager" compute values and first derivatives. The formula in PyTorch's own operations takes over inside a
    transform of torch.func or `torch.compile`, for tensors with tangents, for subclasses of Tensor, while a
    mode of PyTorch records operations, and where the backward is differentiated.

    Args:
        x: the stream, (…, D).
        branch: the branch's output, (…, D). Its dtype may differ from x's.
        weight, bias: gain and shift, (D,), of any floating dtype; None for 1 and 0.
        eps: ε.
        norm: "layer" for (s − mean)/√(var + ε), "rms" for s/√(mean s² + ε).
        alpha: factor of x (DeepNorm's α); a number, which gets no gradient.
        dropout_p: probability that a feature of the branch is dropped. The others are multiplied by
            1/(1 − p). A dropped feature is 0; if it was not finite, it may be NaN.
        training: whether dropout is on.
        generator: source of dropout's randomness, on x's device; None for PyTorch's own.
        prenorm: whether the stream is the sum.
        stream_dtype: dtype of the stream; None for x's.
        backend: "eager", "compile" or "triton". None chooses by device, dtype and size among those that start
            at once; "any" may also choose "compile", which takes seconds for the first call of each kind.
            "flash-attn", "liger" and "quack" take the forward of these packages where it keeps the contract;
            they are untested, and only chosen by name.

    Returns:
        normed in branch's dtype, and the stream. Without `prenorm` both are one tensor if their dtypes agree.
        An empty batch gives empty tensors. The draws of dropout differ between backends.

    Raises:
        UsageError: shapes, dtypes, devices or numbers do not fit, or the backend cannot compute this call.
    """
    arrays = (x, branch, weight, bias)
    checks.require_arrays(arrays)
    checks.require_generator(generator)
    dtypes = (x.dtype, branch.dtype, x.dtype if stream_dtype is None else stream_dtype)
    form = checks.checked_form(norm, eps, alpha, dropout_p, training, prenorm, *dtypes)
    kernel = kernel_for(backend, form, arrays)
    if kernel is None or x.numel() == 0 or not is_plain(arrays):
        return _by_formula(form, arrays, generator)
    return fused(kernel, form, arrays, kernel.draw(form, branch, generator) if form.drop else None)


def _by_formula(form: Form, arrays: Arrays, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """The formula, with PyTorch's own dropout where it can be: it has fewer passes than a mask."""
    x, branch, weight, bias = arrays
    if not form.drop:
        return formula.forward(form, arrays, None)
    if generator is not None:
        return formula.forward(form, arrays, draw_mask(form, branch, generator))
    dropped = functional.dropout(formula.as_dtype(branch, form.dtype), form.drop)
    return formula.forward(form, (x, dropped, weight, bias), None)
