"""`python -m benchmarks.precision`: what a norm loses in half precision, in tables.

Inputs are Gaussian with std 1, plus an offset, rounded to the dtype. Errors are relative to float64
statistics of the rounded input: they show the algorithm, not the rounding of its input.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from normscope.kernels.statistics import Method, Order, moments

HALVES = (torch.float16, torch.bfloat16)
METHODS: tuple[Method, ...] = ("two-pass", "welford", "one-pass")
OFFSETS = (0.0, 1.0, 10.0, 100.0, 1e3, 1e4)
WIDTHS = (64, 1024, 8192)
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)
NUM_ROWS = 64
Norm = Callable[[Tensor], Tensor]


def drawn(width: int, offset: float, dtype: torch.dtype, std: float = 1.0, seed: int = 0) -> Tensor:
    """Gaussian rows (NUM_ROWS, width) in the dtype."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_ROWS, width, generator=draw, dtype=torch.float64)
    return (std * x + offset).to(dtype)


def variance_table(dtype: torch.dtype, order: Order, widths: Sequence[int]) -> Iterator[list[str]]:
    """Largest relative error of the variance over the rows; lines are methods and widths, columns offsets."""
    yield [f"{name(dtype)}, {order}", "d", *(f"{offset:g}" for offset in OFFSETS)]
    for method in METHODS:
        for width in widths:
            yield [method, str(width), *(_variance_error(dtype, method, order, width, o) for o in OFFSETS)]


def _variance_error(dtype: torch.dtype, method: Method, order: Order, width: int, offset: float) -> str:
    x = drawn(width, offset, dtype)
    exact = x.double().var(-1, correction=0)
    if not bool((exact > 0).all()):
        return "constant"
    found = moments(x, method=method, order=order).variance.double()
    if not bool(found.isfinite().all()):
        return "overflow"
    return f"{float((found / exact - 1).abs().max()):.0e}"


def epsilon_table() -> Iterator[list[str]]:
    """ε in half precision: its stored value, and the smallest variance that swallows it."""
    yield [
        "ε",
        *(f"{name(dtype)} {what}" for dtype in HALVES for what in ("stores", "variance + ε = variance from")),
    ]
    for eps in EPSILONS:
        yield [
            f"{eps:g}",
            *(cell for dtype in HALVES for cell in (_stored(eps, dtype), _swallowed(eps, dtype))),
        ]


def _stored(eps: float, dtype: torch.dtype) -> str:
    stored = float(torch.tensor(eps, dtype=dtype))
    if stored == 0:
        return "0"
    kind = " (subnormal)" if stored < torch.finfo(dtype).tiny else ""
    return f"{stored:.4g}{kind}"


def _swallowed(eps: float, dtype: torch.dtype) -> str:
    """The smallest power of two v with v + ε = v in the dtype, both rounded to it."""
    powers = torch.tensor([2.0**k for k in range(-60, 15)], dtype=torch.float64).to(dtype)
    powers = powers[powers > 0]
    same = powers + torch.tensor(eps, dtype=dtype) == powers
    return f"2^{math.log2(float(powers[same][0])):.0f}"


def gain_table(dtype: torch.dtype) -> Iterator[list[str]]:
    """RMS of LayerNorm's output by ε and std of the input, d = 1024: exact, in the dtype, and by PyTorch."""
    stds = (1.0, 1e-2, 1e-3, 1e-4, 1e-5, 0.0)
    yield [f"{name(dtype)}: ε", "computed", *(f"std {std:g}" for std in stds)]
    for eps in EPSILONS:
        for how, norm in _LAYER_NORMS.items():
            yield [f"{eps:g}", how, *(_rms(norm(drawn(1024, 0.0, dtype, std=std), eps)) for std in stds)]


def _rms(y: Tensor) -> str:
    return f"{float(y.double().square().mean().sqrt()):.3g}"


def in_half(x: Tensor, eps: float, centred: bool = True) -> Tensor:
    """LayerNorm or RMSNorm, every operation in the dtype of x; sums by halves."""
    mean, variance = moments(x if centred else x.square(), method="two-pass")
    power = variance if centred else mean
    rest = x - mean[..., None] if centred else x
    return rest * torch.rsqrt(power + torch.tensor(eps, dtype=x.dtype))[..., None]


_LAYER_NORMS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "exact": lambda x, eps: functional.layer_norm(x.double(), x.shape[-1:], eps=eps),
    "all in half": in_half,
    "F.layer_norm": lambda x, eps: functional.layer_norm(x, x.shape[-1:], eps=eps),
}


def island(x: Tensor, eps: float, centred: bool = True) -> Tensor:
    """The statistics in float32, then rounded to the dtype of x; the rest in that dtype."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True) if centred else torch.zeros_like(wide[..., :1])
    scale = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    return (x - mean.to(x.dtype)) * scale.to(x.dtype)


def rounded_once(x: Tensor, eps: float, centred: bool = True) -> Tensor:
    """Everything in float32; only the output is rounded to the dtype of x."""
    wide = x.float()
    rest = wide - wide.mean(-1, keepdim=True) if centred else wide
    return (rest * torch.rsqrt(rest.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def island_table(dtype: torch.dtype, centred: bool) -> Iterator[list[str]]:
    """Relative error of a norm's output, d = 1024, by what is computed in float32."""
    kind = "LayerNorm" if centred else "RMSNorm"
    native = functional.layer_norm if centred else functional.rms_norm
    norms: dict[str, Norm] = {
        "nothing (all in half)": lambda x: in_half(x, 1e-5, centred),
        "statistics": lambda x: island(x, 1e-5, centred),
        "all but the output": lambda x: rounded_once(x, 1e-5, centred),
        f"PyTorch's {native.__name__}": lambda x: native(x, x.shape[-1:], eps=1e-5),
    }
    yield [f"{kind}, {name(dtype)}: in float32", *(f"{offset:g}" for offset in OFFSETS)]
    for what, norm in norms.items():
        yield [what, *(_output_error(norm, native, drawn(1024, offset, dtype)) for offset in OFFSETS)]


def _output_error(norm: Norm, native: Callable[..., Tensor], x: Tensor) -> str:
    return relative(norm(x), native(x.double(), x.shape[-1:], eps=1e-5))


def relative(found: Tensor, exact: Tensor) -> str:
    """Relative error in the Frobenius norm, or the reason why there is none."""
    size = float(exact.norm())
    if not bool(found.isfinite().all()):
        return "not finite"
    return f"{float((found.double() - exact).norm()) / size:.0e}" if size > 1e-6 else "constant"


def gradient_table() -> Iterator[list[str]]:
    """Relative error of LayerNorm's gradients, d = 1024, by PyTorch and in float32, rounded at the end."""
    offsets = (0.0, 10.0, 100.0)
    yield ["dtype of x", "dtype of γ", "gradient", "computed", *(f"{offset:g}" for offset in offsets)]
    for dtype in HALVES:
        for gain in (dtype, torch.float32):
            for index, which in enumerate(("x", "γ")):
                for how, inside in (("F.layer_norm", dtype), ("in float32, rounded once", torch.float32)):
                    errors = [_gradient_error(drawn(1024, o, dtype), gain, inside, index) for o in offsets]
                    yield [name(dtype), name(gain), which, how, *errors]


def _gradient_error(x: Tensor, gain: torch.dtype, inside: torch.dtype, index: int) -> str:
    grad = drawn(1024, 0.0, x.dtype, seed=1)
    weight = torch.ones(1024, dtype=gain)
    exact = _gradients(x.double(), weight.double(), grad.double())[index]
    if inside is x.dtype:
        return relative(_gradients(x, weight, grad)[index], exact)
    found = _gradients(x.float(), weight.float(), grad.float())[index]
    return relative(found.to((x, weight)[index].dtype), exact)


def _gradients(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    leaves = [each.clone().requires_grad_() for each in (x, weight)]
    y = functional.layer_norm(leaves[0], x.shape[-1:], leaves[1], torch.zeros_like(weight))
    return torch.autograd.grad(y, leaves, grad)


def name(dtype: torch.dtype) -> str:
    """The dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def tables() -> dict[str, Iterable[list[str]]]:
    """The tables by heading, computed when they are read."""
    result: dict[str, Iterable[list[str]]] = {}
    for dtype in (*HALVES, torch.float32):
        result[f"Error of the variance, {name(dtype)}"] = variance_table(dtype, "pairwise", WIDTHS)
        result[f"Sequential sums, {name(dtype)}"] = variance_table(dtype, "sequential", (64, 8192))
    result["ε in half precision"] = epsilon_table()
    for dtype in HALVES:
        result[f"RMS of the output, {name(dtype)}"] = gain_table(dtype)
    for centred in (True, False):
        for dtype in HALVES:
            kind = "LayerNorm" if centred else "RMSNorm"
            result[f"float32 islands, {kind}, {name(dtype)}"] = island_table(dtype, centred)
    result["Gradients of LayerNorm"] = gradient_table()
    return result


def main() -> None:
    """Print the tables as Markdown."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    for heading, table in tables().items():
        lines = list(table)
        print(f"\n{heading}\n")
        for line in (lines[0], ["---"] * len(lines[0]), *lines[1:]):
            print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
