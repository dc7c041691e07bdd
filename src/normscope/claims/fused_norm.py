"""An add and a LayerNorm in one pass over memory or in two, in C: the same loops, built on the spot.

Shapes: N rows, D width.
"""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

SUMS_IN_ANY_ORDER = ("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math")
"""What lets sums be vectorised. Not -ffast-math: linked with it, a library flushes all denormals."""
CODE = r"""
#include <math.h>
static void norm_row(const float *s, float *y, const float *gain, const float *bias, long d, float eps) {
    float mean = 0, square = 0;
    for (long i = 0; i < d; i++) mean += s[i];
    mean /= d;
    for (long i = 0; i < d; i++) square += (s[i] - mean) * (s[i] - mean);
    float scale = 1 / sqrtf(square / d + eps);
    for (long i = 0; i < d; i++) y[i] = (s[i] - mean) * scale * gain[i] + bias[i];
}
static void add_row(const float *x, const float *f, float *s, long d) {
    for (long i = 0; i < d; i++) s[i] = x[i] + f[i];
}
void separate(const float *x, const float *f, float *s, float *y, const float *gain, const float *bias,
              long n, long d, float eps) {
    for (long r = 0; r < n; r++) add_row(x + r * d, f + r * d, s + r * d, d);
    for (long r = 0; r < n; r++) norm_row(s + r * d, y + r * d, gain, bias, d, eps);
}
void fused(const float *x, const float *f, float *s, float *y, const float *gain, const float *bias,
           long n, long d, float eps) {
    for (long r = 0; r < n; r++) {
        add_row(x + r * d, f + r * d, s + r * d, d);
        norm_row(s + r * d, y + r * d, gain, bias, d, eps);
    }
}
void fused_without_sum(const float *x, const float *f, float *row, float *y, const float *gain,
                       const float *bias, long n, long d, float eps) {
    for (long r = 0; r < n; r++) {
        add_row(x + r * d, f + r * d, row, d);
        norm_row(row, y + r * d, gain, bias, d, eps);
    }
}
"""
"""The last one keeps no sum beyond its row."""
EPS = 1e-5
AddNorm = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(x, f, sum, y, gain, bias), all float32 and contiguous; sum (N, D) and y (N, D) are written."""


def build_add_norms() -> dict[str, AddNorm] | None:
    """`separate`, `fused` and `fused_without_sum`, None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "add_norm.c"), Path(folder, "add_norm.so")
        source.write_text(CODE)
        flags = [
            "-O3",
            "-march=native",
            *SUMS_IN_ANY_ORDER,
            "-fno-inline-small-functions",
            "-shared",
            "-fPIC",
        ]
        subprocess.run([compiler, *flags, str(source), "-o", str(library), "-lm"], check=True)
        loaded = ctypes.CDLL(str(library))
    return {name: _callable(loaded, name) for name in ("separate", "fused", "fused_without_sum")}


def _callable(library: ctypes.CDLL, name: str) -> AddNorm:
    function = getattr(library, name)
    function.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_long] * 2 + [ctypes.c_float]
    function.restype = None

    def call(x: Tensor, f: Tensor, total: Tensor, y: Tensor, gain: Tensor, bias: Tensor) -> None:
        pointers = [tensor.data_ptr() for tensor in (x, f, total, y, gain, bias)]
        function(*pointers, x.shape[0], x.shape[1], EPS)

    return call
