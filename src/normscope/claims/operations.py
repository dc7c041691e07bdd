"""Operations and parameters: of a norm, of norms and adds beside the branches; and a claim about GPUs.

Shapes: B batch, T tokens, D width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.claims.at_start import blocks_of, size_of
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, lines_by, plots
from normscope.claims.measure import NotMeasured
from normscope.claims.memory import flops, less
from normscope.nn import build
from normscope.nn.norms import NORMS

NORM_WIDTHS, EPS = (32, 64, 256, 1024, 4096), 1e-5
RANGE = (7.0, 64.0)
"""Per cent, as 003 prints it."""
NEAR = 10.0
"""Points: how near its ends a saving must come for the range to be one of operations."""


@claim("B13")
def operations_of_rms_norm(setup: Setup) -> Evidence:
    """Operations of both norms, counted as they are dispatched."""
    counted = [case for width in NORM_WIDTHS for case in _counts(width)]
    savings = [case.value for case in counted]
    claimed = [
        Case(None, f"{said} saving, {end:g} % printed", value, abs(value - end) <= NEAR)
        for said, value, end in zip(("least", "most"), (min(savings), max(savings)), RANGE, strict=True)
    ]
    return Evidence(
        [*claimed, *counted],
        Figure("most operations saved, in %", {None: max(savings)}),
        plots=plots("B13", lines_by(counted, "width", "way")),
        notes=[
            f"The savings span {max(savings) - min(savings):.2g} points; the printed range spans "
            f"{RANGE[1] - RANGE[0]:g}. In the paper of RMSNorm {RANGE[0]:g} to {RANGE[1]:g} % are running "
            "times of models."
        ],
        unmeasured=["running times, which depend on kernels and hardware"],
    )


def _counts(width: int) -> Iterator[Case]:
    for affine in (True, False):
        layer, rms = (operations(kind, width, affine=affine) for kind in ("layernorm", "rmsnorm"))
        agree = layer["agrees"] and rms["agrees"]
        for name in ("forward", "backward", "both"):
            saved = less(rms[name], layer[name])
            way = f"{name}{'' if affine else ', no γ'}"
            where = f"d = {width}, {'' if agree else 'not what our norms compute, '}{way}"
            holds = bool(agree) and RANGE[0] <= saved <= RANGE[1]
            yield Case(None, where, saved, holds, "inside", at={"width": width, "way": way})


class Count(TorchDispatchMode):
    """Inside, arithmetic is counted: one operation an element of a result, or of what is summed."""

    ARITHMETIC = frozenset({"add", "sub", "mul", "div", "rsqrt", "neg", "mean", "sum"})

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        assert name in self.ARITHMETIC or name in ("unsqueeze", "view", "detach", "t"), name
        if name in ("mean", "sum"):
            self.operations += args[0].numel()
        elif name in self.ARITHMETIC:
            self.operations += result.numel()
        return result


def _forward(
    centred: bool, x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    """LayerNorm where `centred`, RMSNorm where not: the output, ẑ and 1/σ."""
    x = x - x.mean(-1, keepdim=True) if centred else x
    scale = ((x * x).mean(-1, keepdim=True) + EPS).rsqrt()
    normal = x * scale
    y = normal if gain is None else normal * gain
    return y if bias is None else y + bias, normal, scale


def _backward(
    centred: bool, g: Tensor, normal: Tensor, scale: Tensor, gain: Tensor | None = None
) -> list[Tensor]:
    """The gradients in x, and in γ and β where there are any."""
    inner = g if gain is None else g * gain
    along = normal * (inner * normal).mean(-1, keepdim=True)
    to_x = ((inner - inner.mean(-1, keepdim=True) if centred else inner) - along) * scale
    to_gain = [] if gain is None else [(g * normal).sum(0)]
    return [to_x, *to_gain, *([g.sum(0)] if to_gain and centred else [])]


def operations(kind: str, width: int, *, affine: bool = True) -> dict[str, Any]:
    """Operations a token, forward, backward and both; and whether the results are those of our norm."""
    generator = torch.Generator().manual_seed(width)
    x, g = (torch.randn(8, width, dtype=torch.float64, generator=generator) for _ in range(2))
    norm = NORMS[kind](width, EPS).double()
    for parameter in norm.parameters() if affine else ():
        nn.init.normal_(parameter, generator=generator)
    parameters = [parameter.detach() for parameter in norm.parameters()] if affine else []
    centred = kind == "layernorm"
    with Count() as ahead:
        y, normal, scale = _forward(centred, x, *parameters)
    with Count() as back:
        gradients = _backward(centred, g, normal, scale, *parameters[:1])
    truth = norm(x.requires_grad_())
    theirs = torch.autograd.grad(truth, [x, *norm.parameters()] if affine else [x], g)
    pairs = zip((y, *gradients), (truth, *theirs), strict=True)
    agrees = all(torch.allclose(mine, its, rtol=1e-9, atol=1e-9) for mine, its in pairs)
    counts = {"forward": ahead.operations / 8, "backward": back.operations / 8}
    return counts | {"both": sum(counts.values()), "agrees": agrees}


WIDTHS, DEPTH, BATCH, TOKENS = (64, 128, 512), 2, 4, 64
MOST = 1.0


@claim("C22")
def residual_cost(setup: Setup) -> Evidence:
    """Operations and parameters of adds and norms, as shares of a training step."""
    cases = [case for width in WIDTHS for case in _shares(width)]
    lines = lines_by((case for case in cases if case.part != "parameters"), "width", "of")
    return Evidence(
        cases,
        Figure.largest("norms and adds in a step's operations or the parameters, in %", cases),
        plots=plots("C22", lines),
        unmeasured=["latency, which the text states for A100 and H100: no GPU here"],
    )


def _shares(width: int) -> Iterator[Case]:
    torch.manual_seed(0)
    model = build("decoder", scheme="pre", width=width, depth=DEPTH, heads=4, context=TOKENS)
    ids = torch.randint(256, (BATCH, TOKENS))
    joins = [r.join for block in blocks_of(model) for _, r in block.sublayers().values()]
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    rows, work = BATCH * TOKENS, flops(lambda: model(ids, ids).loss.backward()) / 100
    adds = 2 * len(joins) * rows * width / work  # two a block forward, and two backward where gradients meet
    normed = len(norms) * rows * operations("layernorm", width)["both"] / work
    own = 100 * size_of(norms) / size_of([model])
    both, learnt = max(adds + normed, own), float(size_of(joins))
    where, at = f"d = {width}", {"width": width}
    yield Case(None, where, both, both < MOST, at=at | {"of": "norms and adds"})
    yield Case(None, where, adds, adds < MOST, "adds", at=at | {"of": "adds alone"})
    yield Case(None, where, learnt, learnt > 0, "parameters")


@claim("C20")
def fused_add_norm(setup: Setup) -> Evidence:
    """Nothing: normscope has no GPU kernel to time, and a CPU's caches say nothing about HBM."""
    raise NotMeasured(
        "the text speaks of GPU kernels; normscope has none to time, and a CPU says nothing about it"
    )
