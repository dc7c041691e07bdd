"""LayerNorm against RMSNorm: operations and time.

Shapes: B batch, T tokens, D width.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.claims.claim import Kind, Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.memory import less, training_step
from normscope.claims.plots import Line, Plot
from normscope.claims.setup import Setup
from normscope.claims.sources import Source
from normscope.claims.timing import HOW, in_turns, ratio, repeated
from normscope.nn import build
from normscope.nn.norms import NORMS

WIDTHS = (32, 64, 256, 1024, 4096)
RANGE = (7.0, 64.0)
"""Per cent, as printed."""
WIDE_SHARE = 0.5
"""The range is one of operations if what is saved there spans at least this share of it."""
EPS, ROUNDS = 1e-5, 15
BATCH, TOKENS, WIDTH, DEPTH = 4, 64, 128, 4


@claim(
    "B13",
    Source("003", "Abstract", "RMSNorm 进一步减少 7-64 % 归一化 FLOPs"),
    Source("003", "Conclusion", "RMSNorm 在此基础上再省 7-64 % FLOPs"),
    says="RMSNorm needs 7 to 64 % fewer floating-point operations than LayerNorm.",
    asks="counted in written-out forward and backward passes that agree with our norms, at widths "
    "from 32 to 4096, the saving is between 7 and 64 %",
    kind=Kind.TENDENCY,
    parts={
        "range": Sentence("7 to 64 % is a range of operations: their saving varies over half of it or more."),
        "time": Sentence(
            "The norm by itself, forward and backward, takes 7 to 64 % less time.",
            "neither norm is a kernel of its own",
        ),
        "model": Sentence(
            "A model's training step takes 7 to 64 % less time (what the RMSNorm paper reports)."
        ),
    },
    alone=True,
)
def operations_of_rms_norm(setup: Setup) -> Evidence:
    """Operations counted as they are dispatched; times of the norm and of a model with it."""
    cases = [case for seed in setup.seeds for case in (*_counts(seed), *_times(seed))]
    counted = [case.value for case in cases if not case.part]
    timed = [case for case in cases if case.part in ("time", "model")]
    return Evidence(
        cases=cases,
        figure=Figure("operations saved, forward and backward, in %", _both(cases)),
        plots=[_plot(cases)],
        notes=[
            f"Operations saved lie between {min(counted):.3g} and {max(counted):.3g} % over all widths and "
            f"passes, a span of {max(counted) - min(counted):.2g}; as printed it is {RANGE[1] - RANGE[0]:g}.",
            "Time saved, median over seeds: "
            + "; ".join(f"{k} {v:.3g} %" for k, v in _medians(timed).items()),
            HOW,
        ],
        of="passes",
        parts_of={"time": "ways to compute it"},
    )


def _counts(seed: int) -> Iterator[Case]:
    by_pass: dict[str, list[float]] = {}
    for width in WIDTHS:
        layer, rms = (operations(kind, width, seed) for kind in ("layernorm", "rmsnorm"))
        agree = layer["agrees"] and rms["agrees"]
        for name in ("forward", "backward", "both"):
            saved = less(rms[name], layer[name])
            by_pass.setdefault(name, []).append(saved)
            where = f"d = {width}, {'' if agree else 'not what our norms compute, '}{name}"
            yield Case(seed=seed, where=where, value=saved, holds=agree and _in_range(saved))
    every = [value for values in by_pass.values() for value in values]
    span = max(every) - min(every)
    holds = span >= WIDE_SHARE * (RANGE[1] - RANGE[0])
    yield Case(seed=seed, where="largest less smallest saving", value=span, holds=holds, part="range")


def _in_range(value: float) -> bool:
    return RANGE[0] <= value <= RANGE[1]


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


Passes = tuple[Callable[..., Any], Callable[..., Any]]


def _layer_forward(x: Tensor, gain: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    centred = x - x.mean(-1, keepdim=True)
    scale = ((centred * centred).mean(-1, keepdim=True) + EPS).rsqrt()
    normal = centred * scale
    return normal * gain + bias, normal, scale


def _layer_backward(g: Tensor, normal: Tensor, scale: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    inner = g * gain
    along = (inner * normal).mean(-1, keepdim=True)
    to_x = (inner - inner.mean(-1, keepdim=True) - normal * along) * scale
    return to_x, (g * normal).sum(0), g.sum(0)


def _rms_forward(x: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = ((x * x).mean(-1, keepdim=True) + EPS).rsqrt()
    normal = x * scale
    return normal * gain, normal, scale


def _rms_backward(g: Tensor, normal: Tensor, scale: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    inner = g * gain
    along = (inner * normal).mean(-1, keepdim=True)
    return (inner - normal * along) * scale, (g * normal).sum(0)


WRITTEN_OUT: Mapping[str, Passes] = MappingProxyType(
    {"layernorm": (_layer_forward, _layer_backward), "rmsnorm": (_rms_forward, _rms_backward)}
)


def operations(kind: str, width: int, seed: int) -> dict[str, Any]:
    """Operations a token, forward, backward and both; and whether the results are those of our norm."""
    generator = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(8, width, dtype=torch.float64, generator=generator) for _ in range(2))
    norm = _norm(kind, width, generator)
    parameters = [parameter.detach() for parameter in norm.parameters()]
    forward, backward = WRITTEN_OUT[kind]
    with Count() as ahead:
        y, normal, scale = forward(x, *parameters)
    with Count() as back:
        gradients = backward(g, normal, scale, parameters[0])
    truth = norm(x.requires_grad_())
    theirs = torch.autograd.grad(truth, [x, *norm.parameters()], g)
    agrees = all(
        torch.allclose(mine, its, rtol=1e-9, atol=1e-9)
        for mine, its in zip((y, *gradients), (truth, *theirs), strict=True)
    )
    counts = {"forward": ahead.operations / 8, "backward": back.operations / 8}
    return counts | {"both": sum(counts.values()), "agrees": agrees}


def _norm(kind: str, width: int, generator: torch.Generator) -> nn.Module:
    norm = NORMS[kind](width, EPS).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter, generator=generator)
    return norm


def _times(seed: int) -> Iterator[Case]:
    """The norm as PyTorch has it and written out, and a model's step."""
    torch.manual_seed(seed)
    x, g = torch.randn(2, BATCH * TOKENS, 512).unbind()
    runs = {kind: _pass_of_module(kind, x, g) for kind in WRITTEN_OUT}
    runs |= {f"{kind}, written out": _written_out(kind, x, g) for kind in WRITTEN_OUT}
    taken = in_turns({name: repeated(run, 4) for name, run in runs.items()}, ROUNDS)
    for how, suffix in (("PyTorch's norm", ""), ("written out", ", written out")):
        saved = 100 * (1 - ratio(taken, f"rmsnorm{suffix}", f"layernorm{suffix}"))
        yield Case(seed=seed, where=how, value=saved, holds=_in_range(saved), met=bool(suffix), part="time")
    steps = {}
    for kind in WRITTEN_OUT:
        model = build(
            "decoder", scheme="pre", norm=kind, width=WIDTH, depth=DEPTH, heads=4, context=TOKENS, bias=False
        )
        steps[kind] = training_step(model, torch.randint(256, (BATCH, TOKENS)))
    saved = 100 * (1 - ratio(in_turns(steps, ROUNDS), "rmsnorm", "layernorm"))
    yield Case(seed=seed, where="step of a model", value=saved, holds=_in_range(saved), part="model")


def _pass_of_module(kind: str, x: Tensor, g: Tensor) -> Callable[[], object]:
    norm, source = NORMS[kind](x.shape[-1], EPS), x.clone().requires_grad_()
    return lambda: torch.autograd.grad(norm(source), [source, *norm.parameters()], g)


def _written_out(kind: str, x: Tensor, g: Tensor) -> Callable[[], object]:
    forward, backward = WRITTEN_OUT[kind]
    parameters = [p.detach() for p in NORMS[kind](x.shape[-1], EPS).parameters()]

    def both() -> None:
        _, normal, scale = forward(x, *parameters)
        backward(g, normal, scale, parameters[0])

    return both


def _both(cases: list[Case]) -> dict[int | None, float]:
    return {case.seed: case.value for case in cases if case.where.endswith("both") and not case.part}


def _medians(cases: list[Case]) -> dict[str, float]:
    by_place: dict[str, list[float]] = {}
    for case in cases:
        by_place.setdefault(case.where, []).append(case.value)
    return {where: sorted(values)[len(values) // 2] for where, values in by_place.items()}


def _plot(cases: list[Case]) -> Plot:
    lines = []
    for name in ("forward", "backward", "both"):
        points: dict[float, list[float]] = {}
        for case in cases:
            if not case.part and f", {name}" in case.where:
                points.setdefault(float(case.where.split()[2].strip(",")), []).append(case.value)
        lines.append(Line.over_seeds(name, points))
    levels = {"7 %": RANGE[0], "64 %": RANGE[1]}
    return Plot("Operations that RMSNorm saves", "width", "% fewer operations", lines, log="x", levels=levels)
