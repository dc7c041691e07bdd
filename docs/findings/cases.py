"""A healthy and a broken model for each finding, and the figure that parts them.

Every model is small and takes seconds on a CPU. `pictures.py` draws the cases and stops where a broken model
does not get its finding, or its healthy twin does.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import normscope
from benchmarks.broken import (
    AttentionOnly,
    Change,
    Unnormed,
    changed,
    dead,
    epsilon,
    nan_weight,
    queries_and_keys,
    scaled,
    wrong_backward,
)
from benchmarks.miswired import CASES as MISWIRED
from normscope import Report
from normscope.subjects import Subject

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


def encoder(change: Change | None = None, **options: Any) -> Encoder:
    """An `Encoder` after a change of its weights."""
    return changed(Encoder(**options), change)


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


def most(quantity: str, change: Callable[[float], float] = lambda value: value) -> Callable[[Report], Points]:
    """The largest value of a quantity, changed; 0 where the model has none."""

    def points(report: Report) -> Points:
        return [(1, change(max(report.measurements.of(quantity).values(), default=0.0)))]

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
class Figure:
    """A figure of a report, as it is drawn.

    Attributes:
        points: points (x, y) of a report.
        label, x: the axes in words; an empty `x` draws two bars.
        log: y in logarithms.
    """

    points: Callable[[Report], Points]
    label: str
    x: str = "block"
    log: bool = True


def diversity(rate: str) -> Figure:
    """Token diversity in a trial of AdamW."""
    return Figure(by_step("diversity"), "token diversity", f"step (AdamW, {rate})")


def bars(points: Callable[[Report], Points], label: str) -> Figure:
    """One figure of each model."""
    return Figure(points, label, "", log=False)


UPDATE = Figure(by_depth("branch/update-ratio"), "update-to-stream ratio", "branch")
RMS = Figure(by_depth("stream/rms"), "RMS of the stream", "site, embedding to head")
GRADIENT = Figure(relative_gradient, "relative gradient")


@dataclass(frozen=True)
class Case:
    """The models of one finding, and the figure that shows the difference.

    Attributes:
        healthy, broken: names of both, short.
        twin, model: how they are built.
        figure: what is drawn of their reports.
        limit: where the rule's threshold lies on the y axis, if it is one value of that axis.
        options, twin_options: arguments of `normscope.check`; the twin has the same where it has none.
        shown: arguments of the check that is drawn for the broken model, if not `options`.
    """

    healthy: str
    broken: str
    twin: Callable[[], nn.Module | Subject]
    model: Callable[[], nn.Module | Subject]
    figure: Figure
    limit: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    twin_options: dict[str, Any] | None = None
    shown: dict[str, Any] | None = None

    def reports(self, code: str) -> tuple[Report, Report]:
        """Reports of both models, of which only the second has the finding; the second as it is drawn."""
        twin_options = self.options if self.twin_options is None else self.twin_options
        healthy, broken = checked(self.twin, twin_options), checked(self.model, self.options)
        found = [code in {finding.code for finding in report.findings} for report in (healthy, broken)]
        assert found == [False, True], f"{code}: found in (healthy, broken) = {found}"
        return healthy, broken if self.shown is None else checked(self.model, self.shown)


def checked(model: Callable[[], nn.Module | Subject], options: dict[str, Any]) -> Report:
    """The report of a model with seed 0; no step is tried unless the options say so."""
    torch.manual_seed(0)
    return normscope.check(model(), **{"steps": 0, "budget": "fast"} | options)


POST = {"pre": False, "final_norm": False}
TRIAL = {"steps": 20, "lr": 1e-3}
deep = partial(encoder, depth=24)
deep_post = partial(encoder, depth=24, **POST)
short_post = partial(encoder, depth=6, **POST)
sharp = partial(encoder, queries_and_keys(50))
loud = partial(encoder, scaled("embedding", 1e6))
forgetful = partial(Skip, 0.4, forgets=True)
unnormed = partial(Unnormed, WIDTH)
one_head = partial(AttentionOnly, WIDTH, 1, std=WIDTH**-0.5)

CASES: dict[str, Case] = {
    "NS101": Case("Pre-LN, 24 blocks", "Post-LN, 24 blocks", deep, deep_post, UPDATE),
    "NS102": Case(
        "Pre-LN, final norm",
        "Pre-LN, no final norm",
        encoder,
        partial(encoder, final_norm=False),
        replace(RMS, log=False),
    ),
    "NS103": Case(
        "blocks drawn anew",
        "blocks copied",
        encoder,
        partial(encoder, anew=False),
        Figure(
            by_depth("weights/identical"),
            "same weights as the block before",
            "block, from the second",
            log=False,
        ),
    ),
    "NS104": Case(
        "every block has a skip",
        "block 7 has none",
        Skip,
        partial(Skip, without=6),
        bars(blocks_read, "blocks read"),
    ),
    "NS201": Case("no norm, Xavier", "no norm, Xavier × 3", unnormed, partial(unnormed, last=3.0), RMS),
    "NS202": Case("Pre-LN", "Post-LN", encoder, partial(encoder, **POST), diversity("1e-3"), options=TRIAL),
    "NS203": Case(
        "all branches train",
        "branch 8 frozen at zero",
        encoder,
        partial(encoder, dead),
        Figure(by_depth("branch/rms"), "RMS of the branch's output", "branch", log=False),
    ),
    "NS204": Case(
        "Pre-LN",
        "block 6 writes × 1000",
        encoder,
        partial(encoder, scaled("layers.5.linear2", 1000)),
        UPDATE,
        0.01,
    ),
    "NS205": Case(
        "Xavier",
        "W_Q, W_K × 50",
        encoder,
        sharp,
        Figure(by_depth("attention/entropy"), "attention entropy, 1 = uniform"),
        0.05,
    ),
    "NS206": Case(
        "logits / √d_h",
        "logits unscaled",
        partial(one_head, WIDTH**-0.5),
        partial(one_head, 1.0),
        Figure(by_depth("attention/logit-spread"), "logit deviation / √(2 log n)", log=False),
        1.0,
    ),
    "NS301": Case("x + F(x)", "0.4 x + F(x), F nearly constant", Skip, forgetful, GRADIENT),
    "NS302": Case("Xavier", "W_Q, W_K × 50", encoder, sharp, GRADIENT),
    "NS303": Case(
        "Pre-LN, 48 blocks",
        "Post-LN, 48 blocks",
        partial(encoder, depth=48),
        partial(encoder, depth=48, **POST),
        Figure(ratio("gradient/q", "gradient/v"), "gradient of W_Q over W_V's"),
        1e-5,
    ),
    "NS304": Case(
        "autograd's",
        "branch 2: gradient halved",
        unnormed,
        partial(wrong_backward, WIDTH, 0.5),
        Figure(
            by_depth("derivative/relative-error"),
            "relative error of Jv",
            "branches, blocks, stack",
            log=False,
        ),
        0.02,
    ),
    "NS401": Case(
        "x + F(x)",
        "0.4 x + F(x), F nearly constant",
        Skip,
        forgetful,
        bars(whole("jacobian/contraction"), "log10 of the stack's gain"),
        -2.0,
    ),
    "NS501": Case(
        "Xavier",
        "embeddings × 1e6",
        encoder,
        loud,
        bars(whole("precision/float16-headroom"), "float16 headroom in bits"),
        3.0,
    ),
    "NS502": Case(
        "Xavier",
        "embeddings × 1e6",
        encoder,
        loud,
        bars(whole("precision/float16-flushed"), "share of the gradient flushed"),
        0.05,
    ),
    "NS503": Case(
        "Xavier",
        "W_Q, W_K × 50",
        encoder,
        sharp,
        bars(whole("precision/bfloat16-cosine"), "cosine to the float32 gradient"),
        0.9,
    ),
    "NS504": Case(
        "ε = 1e-5",
        "ε = 1e-12",
        encoder,
        partial(encoder, epsilon(1e-12)),
        Figure(by_depth("precision/eps"), "ε", "norm"),
        2.0**-25,
    ),
    "NS505": Case(
        "ε = 1e-5",
        "ε = 100",
        encoder,
        partial(encoder, epsilon(100.0)),
        Figure(by_depth("precision/eps-ratio-median"), "ε / median variance", "norm"),
        1.0,
    ),
    "NS506": Case(
        "finite",
        "one weight of block 5 is NaN",
        encoder,
        partial(encoder, nan_weight),
        replace(RMS, log=False),
    ),
    "NS601": Case(
        "Pre-LN, 24 blocks",
        "Post-LN, 24 blocks",
        deep,
        deep_post,
        diversity("1e-4"),
        options=TRIAL | {"lr": 1e-4},
    ),
    "NS602": Case(
        "Post-LN, warm-up of 10 steps",
        "Post-LN, no warm-up",
        short_post,
        short_post,
        diversity("3e-3"),
        options=TRIAL | {"lr": 3e-3, "warmup": 200},
        twin_options=TRIAL | {"lr": 3e-3, "warmup": 10},
        shown=TRIAL | {"lr": 3e-3},
    ),
    "NS603": Case(
        "SGD, 0.1",
        "SGD, 10",
        encoder,
        encoder,
        Figure(by_step("loss"), "loss", "step"),
        options=TRIAL | {"lr": 10.0, "optimizer": "sgd"},
        twin_options=TRIAL | {"lr": 0.1, "optimizer": "sgd"},
    ),
}
"""One case for each finding, by its code."""


def lost(rate: float) -> float:
    """Share that decay takes of a value in 10 000 steps."""
    return 1 - math.exp(-rate * 10_000)


WIRED: dict[str, tuple[str, str, Figure, float | None]] = {
    "NS701": (
        "causal mask",
        "block 3 without a mask",
        bars(most("wiring/later-tokens"), "change before the replaced ids, over the change behind"),
        1e-3,
    ),
    "NS702": (
        "heads split off the features",
        "block 3 reshapes across samples",
        bars(most("wiring/other-samples"), "change of the other samples, over the sample's own"),
        1e-3,
    ),
    "NS703": (
        "mask in every block",
        "block 3 without the mask",
        bars(most("wiring/padding-content"), "change of real tokens by padding, over the largest output"),
        1e-3,
    ),
    "NS704": (
        "every branch learns",
        "block 3: mlp(x).detach()",
        bars(most("wiring/num-starved"), "trained parameters without gradient"),
        None,
    ),
    "NS705": (
        "every branch trains",
        "block 3 is frozen",
        Figure(by_depth("wiring/frozen"), "frozen share of the branch's matrices", "branch", log=False),
        None,
    ),
    "NS706": (
        "AdamW(model)",
        "AdamW(model.layers)",
        bars(most("wiring/held-share"), "share of the trained entries in an optimizer"),
        None,
    ),
    "NS707": (
        "float32, AdamW at 1e-5",
        "bfloat16, AdamW at 1e-5",
        bars(most("wiring/update-lost"), "largest share of a tensor that a step leaves as it was"),
        0.5,
    ),
    "NS708": (
        "head N(0, 0.02²)",
        "head N(0, 1)",
        bars(most("wiring/first-loss"), "first loss in nats; ln V = 5.5"),
        math.log(256) + 1,
    ),
    "NS709": (
        "initialised",
        "a gain of 0, entries of 1e30",
        bars(most("wiring/odd-weights"), "parameters with values that no initialisation gives"),
        None,
    ),
    "NS710": (
        "no tensor owns the norm",
        "a bias × 1e7 owns it",
        bars(most("wiring/clipped-rest"), "RMS gradient of the others after clipping, over Adam's ε"),
        1.0,
    ),
    "NS711": (
        "decay 0.1 on matrices",
        "decay 0.1 on everything",
        bars(most("wiring/decay", lost), "share of a gain that decay takes in 10 000 steps, AdamW, 1e-3"),
        0.1,
    ),
    "NS712": (
        "labels are the next ids",
        "labels are the ids",
        bars(most("wiring/targets-same"), "share of targets that equal their own input"),
        0.9,
    ),
    "NS713": (
        "cross_entropy(logits.float())",
        "cross_entropy(bfloat16 logits)",
        bars(most("wiring/loss-error"), "error of the loss in nats"),
        0.01,
    ),
}
CASES |= {
    code: Case(healthy, broken, *MISWIRED[code], figure, limit, {"lr": 1e-5} if code == "NS707" else {})
    for code, (healthy, broken, figure, limit) in WIRED.items()
}
