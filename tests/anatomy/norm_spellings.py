"""Spellings of norms: statistics, roots and gains that people write, each of which must read the same."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

D = 16
EPS = 1e-5
Formula = Callable[[Tensor], Tensor]


def _bmm(x: Tensor) -> Tensor:
    rows = x.reshape(-1, D)
    return torch.bmm(rows[:, None, :], rows[:, :, None]).view(*x.shape[:-1], 1) / D


def _ones(columns: int) -> Formula:
    return lambda x: (x**2) @ torch.ones(D, columns, dtype=x.dtype) / D


def _moments(x: Tensor) -> Tensor:
    return torch.var(x, -1, unbiased=False, keepdim=True) + x.mean(-1, keepdim=True) ** 2


MEAN_SQUARES: dict[str, Formula] = {
    "pow-mean": lambda x: x.pow(2).mean(-1, keepdim=True),
    "product-mean": lambda x: (x * x).mean(dim=-1, keepdim=True),
    "square-sum-over-d": lambda x: x.square().sum(-1, keepdim=True) / D,
    "power-sum-times-inverse": lambda x: (x**2).sum(-1, keepdim=True) * (1 / D),
    "einsum": lambda x: torch.einsum("...d,...d->...", x, x)[..., None] / D,
    "einsum-btd": lambda x: torch.einsum("btd,btd->bt", x, x).unsqueeze(-1) / D,
    "matmul": lambda x: (x[..., None, :] @ x[..., :, None]).squeeze(-1) / D,
    "bmm": _bmm,
    "vector-norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True) ** 2 / D,
    "linalg-norm": lambda x: torch.linalg.norm(x, dim=-1, keepdim=True).square() / D,
    "norm": lambda x: x.norm(2, -1, keepdim=True).pow(2) / D,
    "norm-over-root-d": lambda x: (x.norm(dim=-1, keepdim=True) / math.sqrt(D)) ** 2,
    "ones-column": _ones(1),
    "ones-matrix": _ones(D),
    "variance-and-mean": _moments,
    "float64": lambda x: x.double().pow(2).mean(-1, keepdim=True).to(x.dtype),
    "abs": lambda x: x.abs().pow(2).mean(-1, keepdim=True),
    "avg-pool": lambda x: F.avg_pool1d(x.square().flatten(0, -2)[None], D).view(*x.shape[:-1], 1),
    "unbound": lambda x: sum(part**2 for part in x.split(1, -1)) / D,
}
"""Spellings of the mean square of the last axis."""
ROOTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rsqrt": lambda x, v: x * torch.rsqrt(v + EPS),
    "rsqrt-first": lambda x, v: torch.rsqrt(v + EPS) * x,
    "power": lambda x, v: x * (v + EPS) ** -0.5,
    "torch-pow": lambda x, v: x * torch.pow(v + EPS, -0.5),
    "one-over-root": lambda x, v: x * (1 / torch.sqrt(v + EPS)),
    "over-root": lambda x, v: x / torch.sqrt(v + EPS),
    "over-power": lambda x, v: x / (v + EPS) ** 0.5,
    "exp-log": lambda x, v: x * torch.exp(-0.5 * torch.log(v + EPS)),
    "reciprocal": lambda x, v: x * torch.reciprocal((v + EPS).sqrt()),
    "root-reciprocal": lambda x, v: x * (v + EPS).reciprocal().sqrt(),
    "rdiv": lambda x, v: x.div((v.add(EPS)).sqrt()),
    "einsum": lambda x, v: torch.einsum("btd,bt->btd", x, (v[..., 0] + EPS).rsqrt()),
    "in-float64": lambda x, v: (x.double() * torch.rsqrt(v.double() + EPS)).to(x.dtype),
    "in-place": lambda x, v: x.clone().mul_(v.clone().add_(EPS).rsqrt_()),
}
"""Spellings of the division by a root with ε below."""


RMS_WITHOUT_EPS: dict[str, Formula] = {
    "norm-clamp": lambda x: x / (x.norm(2, -1, keepdim=True) / math.sqrt(D)).clamp(min=1e-6),
    "norm-plus": lambda x: x / (x.norm(2, -1, keepdim=True) / math.sqrt(D) + 1e-6),
    "norm-max": lambda x: x / torch.maximum(x.norm(dim=-1, keepdim=True), torch.tensor(1e-6)) * math.sqrt(D),
    "normalize": lambda x: F.normalize(x, dim=-1) * math.sqrt(D),
    "normalize-over": lambda x: F.normalize(x, dim=-1) / D**-0.5,
    "root-in-the-factor": lambda x: x * (math.sqrt(D) / x.norm(dim=-1, keepdim=True)),
    "no-eps": lambda x: x * x.square().mean(-1, keepdim=True).rsqrt(),
    "clamped-mean": lambda x: x * x.square().mean(-1, keepdim=True).clamp(min=1e-6).rsqrt(),
    "scaled-by-the-largest": lambda x: _over_rms(x / x.abs().amax(-1, keepdim=True)),
}
"""Spellings of RMSNorm without ε below the root."""


def _over_rms(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


L2: dict[str, tuple[Formula, float | None]] = {
    "normalize": (lambda x: F.normalize(x, dim=-1), None),
    "norm": (lambda x: x / x.norm(dim=-1, keepdim=True), None),
    "norm-plus": (lambda x: x / (x.norm(dim=-1, keepdim=True) + 1e-6), None),
    "root-of-sum": (lambda x: x / (x.square().sum(-1, keepdim=True) + EPS).sqrt(), EPS),
    "einsum": (lambda x: x * (torch.einsum("...d,...d->...", x, x)[..., None] + EPS).rsqrt(), EPS),
    "mean-times-d": (lambda x: x / (D * x.square().mean(-1, keepdim=True) + EPS).sqrt(), EPS),
}
"""Spellings of unit vectors, with the ε that is added to the sum of squares."""
MEANS: dict[str, Formula] = {
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum-over-d": lambda x: x.sum(-1, keepdim=True) / D,
    "einsum": lambda x: torch.einsum("btd,d->bt", x, torch.full((D,), 1 / D))[..., None],
    "matmul": lambda x: x @ torch.full((D, 1), 1 / D),
    "matrix": lambda x: x @ torch.full((D, D), 1 / D),
}
"""Spellings of the mean of the last axis."""
VARIANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "var": lambda x, m: x.var(-1, unbiased=False, keepdim=True),
    "squares": lambda x, m: ((x - m) ** 2).mean(-1, keepdim=True),
    "products": lambda x, m: ((x - m) * (x - m)).sum(-1, keepdim=True) / D,
    "moments": lambda x, m: x.square().mean(-1, keepdim=True) - m[..., :1] ** 2,
    "einsum": lambda x, m: torch.einsum("btd,btd->bt", x - m, x - m)[..., None] / D,
    "var-mean": lambda x, m: torch.var_mean(x, -1, correction=0, keepdim=True)[0],
    "std": lambda x, m: x.std(-1, unbiased=False, keepdim=True) ** 2,
    "unbiased": lambda x, m: x.var(-1, keepdim=True) * ((D - 1) / D),
}
"""Spellings of the variance, given the mean."""


def _batch_norm(x: Tensor) -> Tensor:
    rows = x.reshape(1, -1, D)
    return F.batch_norm(rows, None, None, training=True, eps=EPS).view_as(x)


def _affine(x: Tensor) -> Tensor:
    mean, inverse = x.mean(-1, keepdim=True), (x.var(-1, unbiased=False, keepdim=True) + EPS).rsqrt()
    return x * inverse - mean * inverse


LAYER: dict[str, Formula] = {
    "native": lambda x: torch.native_layer_norm(x, (D,), None, None, EPS)[0],
    "functional": lambda x: F.layer_norm(x, (D,), eps=EPS),
    "batch-norm": _batch_norm,
    "group-norm": lambda x: F.group_norm(x.reshape(-1, D), 1, eps=EPS).view_as(x),
    "native-group-norm": lambda x: F.group_norm(x.reshape(-1, D, 1), 1, eps=EPS).view_as(x),
    "instance-norm": lambda x: F.instance_norm(x, eps=EPS),
    "affine": _affine,
    "centred-then-rms": lambda x: F.rms_norm(x - x.mean(-1, keepdim=True), (D,), eps=EPS),
    "einsum-of-both": lambda x: ROOTS["rsqrt"](
        x - MEANS["einsum"](x), MEAN_SQUARES["einsum"](x - MEANS["einsum"](x))
    ),
}
"""Whole LayerNorms, with ε below the root."""
LAYER_WITHOUT_EPS: dict[str, Formula] = {
    "std": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6),
    "std-mean": lambda x: (x - torch.std_mean(x, -1, keepdim=True)[1]) / x.std(-1, keepdim=True),
}
"""LayerNorms without ε below the root; The Annotated Transformer divides by the unbiased σ + ε."""
GAINS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], float]] = {
    "after": (lambda y, w: y * w, 0.0),
    "before": (lambda y, w: w * y, 0.0),
    "float64": (lambda y, w: (y.double() * w.double()).to(y.dtype), 0.0),
    "offset": (lambda y, w: y * (1 + w), 1.0),
    "offset-last": (lambda y, w: (w + 1.0) * y, 1.0),
    "offset-apart": (lambda y, w: y + y * w, 1.0),
    "addcmul": (lambda y, w: torch.addcmul(torch.zeros(D), y, w), 0.0),
    "einsum": (lambda y, w: torch.einsum("btd,d->btd", y, w), 0.0),
}
"""Spellings of the gain, with the number that is added to the weight."""
