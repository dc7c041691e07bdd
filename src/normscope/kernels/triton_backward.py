"""Triton: all gradients in one pass over the rows, with partial sums for weight and bias.

Import this only where Triton is installed (see `triton_forward.py`).
"""

import triton
import triton.language as tl

from normscope.kernels.triton_forward import kept, rounded, standardised, summed


@triton.jit
def backward_kernel(
    s_ptr,
    x_ptr,
    branch_ptr,
    weight_ptr,
    seed_ptr,
    grad_normed_ptr,
    grad_stream_ptr,
    grad_x_ptr,
    grad_branch_ptr,
    weight_parts_ptr,
    bias_parts_ptr,
    num_rows,
    width,
    eps,
    alpha,
    drop,
    kept_scale,
    IS_LAYER: tl.constexpr,
    PRENORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradients of x and branch, and one partial sum a program for those of weight and bias.

    Pointers that are None: s where it is computed again from x and branch, else x and branch; gradients that
    are 0; `grad_branch_ptr` if it is grad_x itself; parts that are not asked for.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    within = columns < width
    weight_part = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    bias_part = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for tile in range(program, tl.cdiv(num_rows, ROWS), num_programs):
        rows = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (rows < num_rows)[:, None] & within[None, :]
        places = rows[:, None] * width + columns[None, :]
        if s_ptr is not None:
            s = tl.load(s_ptr + places, mask=inside, other=0.0).to(tl.float32)
        else:
            s = summed(x_ptr, branch_ptr, seed_ptr, places, inside, alpha, drop, kept_scale)
        unit, inverse = standardised(s, inside, width, eps, IS_LAYER)
        grad = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        if grad_normed_ptr is not None:
            grad += tl.load(grad_normed_ptr + places, mask=inside, other=0.0).to(tl.float32)
        through = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        if grad_stream_ptr is not None:
            through += tl.load(grad_stream_ptr + places, mask=inside, other=0.0).to(tl.float32)
            if not PRENORM:
                grad += through
                through = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        weight_part += grad * unit
        bias_part += grad
        if weight_ptr is not None:
            grad *= tl.load(weight_ptr + columns, mask=within, other=0.0).to(tl.float32)[None, :]
        across = grad - unit * (tl.sum(grad * unit, axis=1)[:, None] / width)
        if IS_LAYER:
            across -= tl.sum(grad, axis=1)[:, None] / width
        grad_s = through + inverse * across
        tl.store(grad_x_ptr + places, rounded(alpha * grad_s, grad_x_ptr.dtype.element_ty), mask=inside)
        if grad_branch_ptr is not None:
            if seed_ptr is not None:
                grad_s = tl.where(kept(seed_ptr, places, drop), grad_s * kept_scale, 0.0)
            tl.store(grad_branch_ptr + places, rounded(grad_s, grad_branch_ptr.dtype.element_ty), mask=inside)
    part = program.to(tl.int64) * width + columns
    if weight_parts_ptr is not None:
        tl.store(weight_parts_ptr + part, tl.sum(weight_part, axis=0), mask=within)
    if bias_parts_ptr is not None:
        tl.store(bias_parts_ptr + part, tl.sum(bias_part, axis=0), mask=within)
