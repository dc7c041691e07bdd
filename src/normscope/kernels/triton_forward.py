"""Triton: the forward in one pass over the rows, and the parts that the backward shares.

A program holds ROWS whole rows in registers; the mean and then the variance are sums over what it holds.
Import this only where Triton is installed; with TRITON_INTERPRET=1 set before the import it runs on a CPU.

R rows, D features; a tile is (ROWS, BLOCK), BLOCK the power of 2 from D.
"""

import triton
import triton.language as tl


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """A float32 value in `dtype`, rounded to nearest even; by bits, as the interpreter truncates bfloat16."""
    if dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        value = tl.where(value == value, upper.to(tl.float32, bitcast=True), value)  # NaN stays as it is
    return value.to(dtype)


@triton.jit
def kept(seed_ptr, places, drop):
    """Dropout's mask: Philox of the seed at each element's place, the same in forward and backward."""
    return tl.rand(tl.load(seed_ptr), places) >= drop


@triton.jit
def summed(x_ptr, branch_ptr, seed_ptr, places, inside, alpha, drop, kept_scale):
    """α·x + dropout(branch) in float32; 0 outside the rows."""
    x = tl.load(x_ptr + places, mask=inside, other=0.0).to(tl.float32)
    branch = tl.load(branch_ptr + places, mask=inside, other=0.0).to(tl.float32)
    if seed_ptr is not None:
        branch = tl.where(kept(seed_ptr, places, drop), branch * kept_scale, 0.0)
    return branch + alpha * x


@triton.jit
def standardised(s, inside, width, eps, IS_LAYER: tl.constexpr):
    """(ẑ, 1/σ) of whole rows in registers; the variance is summed around the mean."""
    if IS_LAYER:
        s = tl.where(inside, s - tl.sum(s, axis=1)[:, None] / width, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(s * s, axis=1)[:, None] / width + eps)
    return s * inverse, inverse


@triton.jit
def forward_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    bias_ptr,
    seed_ptr,
    normed_ptr,
    stream_ptr,
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
    """normed and stream of ROWS rows; `stream_ptr` None if the stream is normed itself."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    places = rows[:, None] * width + columns[None, :]
    s = summed(x_ptr, branch_ptr, seed_ptr, places, inside, alpha, drop, kept_scale)
    value, _ = standardised(s, inside, width, eps, IS_LAYER)
    if weight_ptr is not None:
        value *= tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        value += tl.load(bias_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    tl.store(normed_ptr + places, rounded(value, normed_ptr.dtype.element_ty), mask=inside)
    if stream_ptr is not None:
        stream = s if PRENORM else value
        tl.store(stream_ptr + places, rounded(stream, stream_ptr.dtype.element_ty), mask=inside)


@triton.jit
def mask_kernel(seed_ptr, keep_ptr, size, drop, BLOCK: tl.constexpr):
    """The mask of the other kernels, written out."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(keep_ptr + places, kept(seed_ptr, places, drop), mask=places < size)
