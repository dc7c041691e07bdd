"""A healthy and a broken model for each finding, and the figure that parts them.

Every model is small and takes seconds on a CPU. `pictures.py` draws the cases and stops where a broken model
does not get its finding, or its healthy twin does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normscope import Report

WIDTH = 64


class Encoder(nn.Module):
    """Byte-level language model around `nn.TransformerEncoder`, every matrix drawn anew (Xavier)."""

    def __init__(self, depth: int = 12, *, pre: bool = True, final_norm: bool = True, anew: bool = True):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=pre)
        norm = nn.LayerNorm(WIDTH) if final_norm else None
        self.encoder = nn.TransformerEncoder(layer, depth, norm=norm, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)
        for weight in self.parameters():
            if anew and weight.dim() > 1:
                nn.init.xavier_uniform_(weight)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.encoder(self.embedding(ids), mask, is_causal=True))


class Unnormed(nn.Module):
    """x + F(x) with no norm anywhere; the last matrix of each branch is multiplied by `gain`."""

    def __init__(self, gain: float = 1.0, depth: int = 12):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(depth)
        )
        self.head = nn.Linear(WIDTH, 256)
        for layer in self.layers:
            nn.init.xavier_normal_(layer[0].weight)
            nn.init.xavier_normal_(layer[2].weight, gain)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class OneHead(nn.Module):
    """Four Pre-LN attention branches with one head of width 64; `scale` multiplies the logits."""

    def __init__(self, scale: float):
        super().__init__()
        self.embedding, self.scale = nn.Embedding(256, WIDTH), scale
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(4))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 256)
        for projection in self.qkv:
            nn.init.normal_(projection.weight, std=WIDTH**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        later = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for norm, qkv, out in zip(self.norms, self.qkv, self.out, strict=False):
            q, k, v = qkv(norm(x)).chunk(3, -1)
            x = x + out((self.scale * q @ k.mT).masked_fill(later, -torch.inf).softmax(-1) @ v)
        return self.head(self.norms[-1](x))


class Skip(nn.Module):
    """Twelve Pre-LN feed-forward branches; the stream is multiplied by `alpha` before each add.

    With `forgets` a branch's output is nearly all bias; block `without` has no skip at all.
    """

    def __init__(self, alpha: float = 1.0, *, forgets: bool = False, without: int | None = None):
        super().__init__()
        self.embedding, self.alpha, self.without = nn.Embedding(256, WIDTH), alpha, without
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )
            for _ in range(12)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        if forgets:
            for layer in self.layers:
                nn.init.normal_(layer[3].weight, std=1e-3)
                nn.init.normal_(layer[3].bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for index, layer in enumerate(self.layers):
            x = layer(x) if index == self.without else self.alpha * x + layer(x)
        return self.head(self.norm(x))


class Backward(torch.autograd.Function):
    """x, with a backward that is `factor` of the right one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradient, None


def encoder(change: Callable[[Encoder], None] | None = None, **options: Any) -> Encoder:
    """An `Encoder` after a change of its weights."""
    model = Encoder(**options)
    with torch.no_grad():
        if change is not None:
            change(model)
    return model


def times(pattern: str, factor: float) -> Callable[[nn.Module], None]:
    """Multiply every parameter whose name holds `pattern`."""

    def change(model: nn.Module) -> None:
        for name, weight in model.named_parameters():
            if pattern in name:
                weight.mul_(factor)

    return change


def queries_and_keys(factor: float) -> Callable[[Encoder], None]:
    """Multiply the rows of queries and keys of every projection."""

    def change(model: Encoder) -> None:
        for layer in model.encoder.layers:
            layer.self_attn.in_proj_weight[: 2 * WIDTH] *= factor

    return change


def epsilon(value: float) -> Callable[[Encoder], None]:
    """Set the ε of every norm."""

    def change(model: Encoder) -> None:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = value

    return change


def frozen_zero(model: Encoder) -> None:
    """One feed-forward branch is zero and has no gradient."""
    for name, weight in model.named_parameters():
        if "layers.3.linear" in name:
            weight.zero_().requires_grad_(False)


def nan_weight(model: Encoder) -> None:
    """One weight of the fifth block is NaN."""
    model.encoder.layers[4].linear1.weight[0, 0] = float("nan")


def wrong_backward() -> nn.Module:
    """A stack without norms; the gradient of the second branch is half of the right one."""
    model = Unnormed()
    model.layers[1].register_forward_hook(lambda module, given, out: Backward.apply(out, 0.5))
    return model


Points = Sequence[tuple[float, float]]


def by_depth(quantity: str) -> Callable[[Report], Points]:
    """A measurement at each of its sites, in the order of the model."""

    def points(report: Report) -> Points:
        rows = [row for row in report.measurements if row.quantity == quantity and row.site]
        return [(i, float(row.value)) for i, row in enumerate(rows, 1) if row.value is not None]

    return points


def ratio(above: str, below: str) -> Callable[[Report], Points]:
    """One measurement over another, at each site of the first."""

    def points(report: Report) -> Points:
        base = report.measurements.of(below)
        values = [value / base[site] for site, value in report.measurements.of(above).items()]
        return list(enumerate(values, 1))

    return points


def relative_gradient(report: Report) -> Points:
    """‖∂loss/∂x‖ · RMS(x) at each block."""
    rms = report.measurements.of("stream/rms")
    rows = report.measurements.of("gradient/stream")
    values = [value * rms[site] for site, value in rows.items() if site in rms and "input" not in site]
    return list(enumerate(values, 1))


def whole(quantity: str) -> Callable[[Report], Points]:
    """One figure of the whole model or stack."""

    def points(report: Report) -> Points:
        values = [
            row.value for row in report.measurements if row.quantity == quantity and row.value is not None
        ]
        return [(1, float(values[0]))]

    return points


def by_step(figure: str) -> Callable[[Report], Points]:
    """A figure of the trial, by step: `loss` or `diversity` of the last stack."""

    def points(report: Report) -> Points:
        assert report.forecast is not None
        if figure == "loss":
            return [(step.step, step.loss) for step in report.forecast.curve]
        return [(step.step, list(step.diversity.values())[-1]) for step in report.forecast.curve]

    return points


def blocks_read(report: Report) -> Points:
    """Blocks that were read."""
    return [(1, len(report.anatomy.blocks))]


@dataclass(frozen=True)
class Case:
    """The models of one finding, and the figure that shows the difference.

    Attributes:
        healthy, broken: names of both, short.
        twin, model: how they are built.
        figure: points (x, y) of a report.
        label, x: the axes in words; no `x` draws two bars.
        limit: where the rule's threshold lies on the y axis, if it is one value of that axis.
        log: y in logarithms.
        options, twin_options: arguments of `normscope.check`; the twin has the same where it has none.
        shown: arguments of the check that is drawn for the broken model, if not `options`.
    """

    healthy: str
    broken: str
    twin: Callable[[], nn.Module]
    model: Callable[[], nn.Module]
    figure: Callable[[Report], Points]
    label: str
    x: str = "block"
    limit: float | None = None
    log: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    twin_options: dict[str, Any] | None = None
    shown: dict[str, Any] | None = None


def checked(model: Callable[[], nn.Module], options: dict[str, Any]) -> Report:
    """The report of a model with seed 0; no step is tried unless the options say so."""
    import normscope

    torch.manual_seed(0)
    return normscope.check(model(), **{"steps": 0, "budget": "fast"} | options)


POST = {"pre": False, "final_norm": False}
TRIAL = {"steps": 20, "lr": 1e-3}
sharp = partial(encoder, queries_and_keys(50))
forgetful = partial(Skip, 0.4, forgets=True)

CASES = {
    "NS101": Case(
        "Pre-LN, 24 blocks",
        "Post-LN, 24 blocks",
        partial(encoder, depth=24),
        partial(encoder, depth=24, **POST),
        by_depth("branch/update-ratio"),
        "update-to-stream ratio",
        "branch",
    ),
    "NS102": Case(
        "Pre-LN, final norm",
        "Pre-LN, no final norm",
        encoder,
        partial(encoder, final_norm=False),
        by_depth("stream/rms"),
        "RMS of the stream",
        "site, embedding to head",
        log=False,
    ),
    "NS103": Case(
        "blocks drawn anew",
        "blocks copied",
        encoder,
        partial(encoder, anew=False),
        by_depth("weights/identical"),
        "same weights as the block before",
        "block, from the second",
        log=False,
    ),
    "NS104": Case(
        "every block has a skip",
        "block 7 has none",
        Skip,
        partial(Skip, without=6),
        blocks_read,
        "blocks read",
        "",
        log=False,
    ),
    "NS201": Case(
        "no norm, Xavier",
        "no norm, Xavier × 3",
        Unnormed,
        partial(Unnormed, 3.0),
        by_depth("stream/rms"),
        "RMS of the stream",
        "site, embedding to head",
    ),
    "NS202": Case(
        "Pre-LN",
        "Post-LN",
        encoder,
        partial(encoder, **POST),
        by_step("diversity"),
        "token diversity",
        "step (AdamW, 1e-3)",
        options=TRIAL,
    ),
    "NS203": Case(
        "all branches train",
        "branch 8 frozen at zero",
        encoder,
        partial(encoder, frozen_zero),
        by_depth("branch/rms"),
        "RMS of the branch's output",
        "branch",
        log=False,
    ),
    "NS204": Case(
        "Pre-LN",
        "block 6 writes × 1000",
        encoder,
        partial(encoder, times("layers.5.linear2", 1000)),
        by_depth("branch/update-ratio"),
        "update-to-stream ratio",
        "branch",
        0.01,
    ),
    "NS205": Case(
        "Xavier",
        "W_Q, W_K × 50",
        encoder,
        sharp,
        by_depth("attention/entropy"),
        "attention entropy, 1 = uniform",
        limit=0.05,
    ),
    "NS206": Case(
        "logits / √d_h",
        "logits unscaled",
        partial(OneHead, WIDTH**-0.5),
        partial(OneHead, 1.0),
        by_depth("attention/logit-spread"),
        "logit deviation / √(2 log n)",
        limit=1.0,
        log=False,
    ),
    "NS301": Case(
        "x + F(x)",
        "0.4 x + F(x), F nearly constant",
        Skip,
        forgetful,
        relative_gradient,
        "relative gradient",
    ),
    "NS302": Case("Xavier", "W_Q, W_K × 50", encoder, sharp, relative_gradient, "relative gradient"),
    "NS303": Case(
        "Pre-LN, 48 blocks",
        "Post-LN, 48 blocks",
        partial(encoder, depth=48),
        partial(encoder, depth=48, **POST),
        ratio("gradient/q", "gradient/v"),
        "gradient of W_Q over W_V's",
        limit=1e-5,
    ),
    "NS304": Case(
        "autograd's",
        "branch 2: gradient halved",
        Unnormed,
        wrong_backward,
        by_depth("derivative/relative-error"),
        "relative error of Jv",
        "branches, blocks, stack",
        0.02,
        log=False,
    ),
    "NS401": Case(
        "x + F(x)",
        "0.4 x + F(x), F nearly constant",
        Skip,
        forgetful,
        whole("jacobian/contraction"),
        "log10 of the stack's gain",
        "",
        -2.0,
        log=False,
    ),
    "NS501": Case(
        "Xavier",
        "embeddings × 1e6",
        encoder,
        partial(encoder, times("embedding", 1e6)),
        whole("precision/float16-headroom"),
        "float16 headroom in bits",
        "",
        3.0,
        log=False,
    ),
    "NS502": Case(
        "Xavier",
        "embeddings × 1e6",
        encoder,
        partial(encoder, times("embedding", 1e6)),
        whole("precision/float16-flushed"),
        "share of the gradient flushed",
        "",
        0.05,
        log=False,
    ),
    "NS503": Case(
        "Xavier",
        "W_Q, W_K × 50",
        encoder,
        sharp,
        whole("precision/bfloat16-cosine"),
        "cosine to the float32 gradient",
        "",
        0.9,
        log=False,
    ),
    "NS504": Case(
        "ε = 1e-5",
        "ε = 1e-12",
        encoder,
        partial(encoder, epsilon(1e-12)),
        by_depth("precision/eps"),
        "ε",
        "norm",
        2.0**-25,
    ),
    "NS505": Case(
        "ε = 1e-5",
        "ε = 100",
        encoder,
        partial(encoder, epsilon(100.0)),
        by_depth("precision/eps-ratio-median"),
        "ε / median variance",
        "norm",
        1.0,
    ),
    "NS506": Case(
        "finite",
        "one weight of block 5 is NaN",
        encoder,
        partial(encoder, nan_weight),
        by_depth("stream/rms"),
        "RMS of the stream",
        "site, embedding to head",
        log=False,
    ),
    "NS601": Case(
        "Pre-LN, 24 blocks",
        "Post-LN, 24 blocks",
        partial(encoder, depth=24),
        partial(encoder, depth=24, **POST),
        by_step("diversity"),
        "token diversity",
        "step (AdamW, 1e-4)",
        options=TRIAL | {"lr": 1e-4},
    ),
    "NS602": Case(
        "Post-LN, warm-up of 10 steps",
        "Post-LN, no warm-up",
        partial(encoder, depth=6, **POST),
        partial(encoder, depth=6, **POST),
        by_step("diversity"),
        "token diversity",
        "step (AdamW, 3e-3)",
        options=TRIAL | {"lr": 3e-3, "warmup": 200},
        twin_options=TRIAL | {"lr": 3e-3, "warmup": 10},
        shown=TRIAL | {"lr": 3e-3},
    ),
    "NS603": Case(
        "SGD, 0.1",
        "SGD, 10",
        encoder,
        encoder,
        by_step("loss"),
        "loss",
        "step",
        options=TRIAL | {"lr": 10.0, "optimizer": "sgd"},
        twin_options=TRIAL | {"lr": 0.1, "optimizer": "sgd"},
    ),
}
"""One case for each finding, by its code."""
