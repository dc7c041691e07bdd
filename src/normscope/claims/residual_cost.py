"""What a residual add and its norm cost beside the branches, and what it helps to fuse the two.

Shapes: B batch, T tokens, D width, N rows.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from normscope.claims.claim import Kind, Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.fused_norm import AddNorm, build_add_norms
from normscope.claims.measure import NotMeasured
from normscope.claims.memory import training_step
from normscope.claims.norm_cost import operations
from normscope.claims.plots import Line, Plot
from normscope.claims.setup import Setup
from normscope.claims.sources import Source
from normscope.claims.timing import HOW, in_turns, ratio, repeated
from normscope.nn import Block, Decoder, build

WIDTHS, DEPTH, BATCH, TOKENS = (64, 128, 512), 2, 4, 64
WIDE = 512
"""An add moves 12 bytes an element and a block multiplies 72·D times for one: under 1 % from about here."""
MOST, ROUNDS, FUSED_ROUNDS = 1.0, 7, 15
SIZES = ((512, 512), (2048, 512), (8192, 512), (8192, 1024))
FUSED = 10.0
"""Per cent: the lower end of what the text promises."""


@claim(
    "C22",
    Source("004", "§9", "其带来的计算延迟增加几乎可以忽略不计"),
    Source("004", "§7", "占整个网络的比重不足1%"),
    says="The residual add costs next to nothing: less than 1 % of a training step.",
    asks="the adds of a step, forward and backward, take less than 1 % of the time of an AdamW step, "
    "at widths 64, 128 and 512",
    condition=f"the width is {WIDE} or more",
    kind=Kind.TENDENCY,
    parts={
        "operations": Sentence("The adds are less than 1 % of a step's operations."),
        "both": Sentence(
            "Norms and adds together are less than 1 % of the operations and of the parameters.",
            f"the width is {WIDE} or more",
        ),
        "both time": Sentence("Norms and adds together take less than 1 % of the time of a step."),
        "parameters": Sentence("The residual connection adds to the number of parameters."),
    },
    alone=True,
)
def residual_cost(setup: Setup) -> Evidence:
    """Time, operations and parameters of adds and norms, as shares of a training step."""
    cases = [case for seed in setup.seeds for width in WIDTHS for case in _shares(width, seed)]
    wide = {case.seed: case.value for case in cases if case.met and not case.part}
    norms = [case.value for case in cases if case.part == "both time" and case.met]
    return Evidence(
        cases=cases,
        figure=Figure(f"adds at d = {WIDE}, in % of a step's time", wide),
        plots=[_plot(cases)],
        notes=[
            f"With the norms it is {min(norms):.3g} to {max(norms):.3g} % of the time at d = {WIDE}: what "
            "they cost is memory traffic, which operations do not count.",
            "Two adds a block forward and two backward, where the gradient of branch and stream meet.",
            HOW,
        ],
        of="models",
    )


@dataclass(frozen=True)
class Shares:
    """Of a training step, in %.

    Attributes:
        add_time, norm_time: of all adds and of all norms, forward and backward.
        add_operations, norm_operations: the same.
        norm_parameters: of the model's parameters.
        join_parameters: how many the residual connections have.
    """

    add_time: float
    norm_time: float
    add_operations: float
    norm_operations: float
    norm_parameters: float
    join_parameters: int


def _shares(width: int, seed: int) -> Iterator[Case]:
    share, where, met = shares(width, seed), f"d = {width}", width >= WIDE
    both = max(share.add_operations + share.norm_operations, share.norm_parameters)
    for part, value, holds in (
        ("", share.add_time, share.add_time < MOST),
        ("operations", share.add_operations, share.add_operations < MOST),
        ("both", both, both < MOST),
        ("both time", share.add_time + share.norm_time, share.add_time + share.norm_time < MOST),
        ("parameters", share.join_parameters, share.join_parameters > 0),
    ):
        yield Case(seed=seed, where=where, value=value, holds=holds, met=met, part=part)


def shares(width: int, seed: int) -> Shares:
    """Measured on a Pre-LN decoder."""
    model, ids = _model(width, seed), torch.randint(256, (BATCH, TOKENS))
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    joins = [residual.join for block in blocks for _, residual in block.sublayers().values()]
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    num_adds, num_parameters = len(joins), sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model(ids, ids).loss.backward()
    model.zero_grad()
    elements = BATCH * TOKENS * width
    work = counter.get_total_flops() / 100
    time = _times(model, ids, norms[0], num_adds, len(norms))
    return Shares(
        add_time=time["adds"],
        norm_time=time["norms"],
        add_operations=2 * num_adds * elements / work,
        norm_operations=len(norms) * BATCH * TOKENS * operations("layernorm", width, seed)["both"] / work,
        norm_parameters=100 * sum(p.numel() for norm in norms for p in norm.parameters()) / num_parameters,
        join_parameters=sum(p.numel() for join in joins for p in join.parameters()),
    )


def _model(width: int, seed: int) -> Decoder:
    torch.manual_seed(seed)
    model = build("decoder", scheme="pre", width=width, depth=DEPTH, heads=4, context=TOKENS)
    assert isinstance(model, Decoder)
    return model


def _times(model: Decoder, ids: Tensor, norm: nn.Module, num_adds: int, num_norms: int) -> dict[str, float]:
    """Adds and norms, forward and backward, in % of a step."""
    x, f = torch.randn(2, BATCH, TOKENS, model.config.width).unbind()
    source = x.clone().requires_grad_()

    def both_ways() -> None:
        torch.autograd.grad(norm(source), [source, *norm.parameters()], f)

    runs: dict[str, Callable[[], object]] = {
        "step": training_step(model, ids),
        "adds": repeated(lambda: x + f, 2 * num_adds),
        "norms": repeated(both_ways, num_norms),
    }
    taken = in_turns(runs, ROUNDS)
    return {name: 100 * ratio(taken, name, "step") for name in ("adds", "norms")}


def _plot(cases: list[Case]) -> Plot:
    lines = []
    for part, name in (
        ("", "adds, time"),
        ("both time", "norms and adds, time"),
        ("operations", "adds, operations"),
        ("both", "norms and adds, operations or parameters"),
    ):
        points: dict[float, list[float]] = {}
        for case in cases:
            if case.part == part:
                points.setdefault(float(case.where.split()[-1]), []).append(case.value)
        lines.append(Line.over_seeds(name, points))
    return Plot("Norms and adds in a training step", "width", "% of the step", lines, "xy", {"1 %": MOST})


@claim(
    "C20",
    Source("004", "§7", "使用Fused Add+Norm kernel能带来10%-20%的显著提速"),
    Source("004", "§9", "显著减少HBM的读写次数"),
    says="Add and LayerNorm fused into one kernel are 10 to 20 % faster.",
    asks="the same loops in C, once over all rows for the add and once for the norm, or both row by "
    "row: the fused form takes at least 10 % less time, from 1 to 32 MiB a tensor",
    condition="the sum is not kept (Pre-LN and training need it)",
    kind=Kind.TENDENCY,
    parts={
        "pytorch": Sentence(
            "The fused loops take 10 % less time than PyTorch's two calls, in the median of sizes."
        ),
        "model": Sentence(
            "Fusing can make a forward pass 10 % faster: adds and norms are 10 % of it or more."
        ),
    },
    alone=True,
)
def fused_add_norm(setup: Setup) -> Evidence:
    """Times of one pass over memory against two, beside the bytes that each moves."""
    kernels = build_add_norms()
    if kernels is None:
        raise NotMeasured("no C compiler to build a fused kernel with")
    cases = [case for seed in setup.seeds for case in _fused_cases(kernels, seed)]
    own = [case for case in cases if not case.part]
    main = {how: [case.value for case in own if case.met is how] for how in (True, False)}
    kept = {s: statistics.median(c.value for c in own if c.seed == s and not c.met) for s in setup.seeds}
    return Evidence(
        cases=cases,
        figure=Figure("time that fusing saves where the sum is kept, median of sizes, in %", kept),
        plots=[_fused_plot(cases)],
        notes=[
            f"Two passes move 5 tensors, one pass 4 with the sum kept ({_fewer(4):.3g} % less) and 3 without "
            f"({_fewer(3):.3g} % less); time saved: {_spread(main[False])} and {_spread(main[True])}.",
            HOW,
        ],
        unmeasured=["a GPU, for which it is said: on a CPU much of the second pass comes from its caches"],
        of="runs",
    )


def _fewer(tensors: int) -> float:
    return 100 * (5 - tensors) / 5


def _spread(values: list[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g} %"


def _fused_cases(kernels: dict[str, AddNorm], seed: int) -> Iterator[Case]:
    against_pytorch = []
    for rows, width in SIZES:
        where = f"{rows * width * 4 / 2**20:g} MiB"
        saved = _saved(kernels, rows, width, seed)
        against_pytorch.append(saved["pytorch"])
        for name, said in (("fused", "sum kept"), ("fused_without_sum", "sum not kept")):
            value, met = saved[name], name != "fused"
            yield Case(seed=seed, where=f"{where}, {said}", value=value, holds=value >= FUSED, met=met)
    value = statistics.median(against_pytorch)
    yield Case(seed=seed, where="sum kept, median", value=value, holds=value >= FUSED, part="pytorch")
    for width in WIDTHS:
        value = _of_forward(width, seed)
        yield Case(seed=seed, where=f"d = {width}", value=value, holds=value >= FUSED, part="model")


def _saved(kernels: dict[str, AddNorm], rows: int, width: int, seed: int) -> dict[str, float]:
    """Per cent of time that the fused forms save, and the fused form beside PyTorch's two calls."""
    x, f = torch.randn(2, rows, width, generator=torch.Generator().manual_seed(seed)).unbind()
    total, y = torch.empty(2, rows, width).unbind()
    gain, bias = torch.ones(width), torch.zeros(width)
    truth = F.layer_norm(x + f, (width,))

    def run_of(kernel: AddNorm) -> Callable[[], None]:
        kernel(x, f, total, y, gain, bias)
        assert torch.allclose(y, truth, atol=1e-4)
        return lambda: kernel(x, f, total, y, gain, bias)

    runs: dict[str, Callable[[], object]] = {name: run_of(kernel) for name, kernel in kernels.items()}
    runs["pytorch"] = lambda: F.layer_norm(x + f, (width,), gain, bias)
    times = max(1, 2**22 // (rows * width))
    taken = in_turns({name: repeated(run, times) for name, run in runs.items()}, FUSED_ROUNDS)
    saved = {name: 100 * (1 - ratio(taken, name, "separate")) for name in ("fused", "fused_without_sum")}
    return saved | {"pytorch": 100 * (1 - ratio(taken, "fused", "pytorch"))}


def _of_forward(width: int, seed: int) -> float:
    """Per cent of a forward pass that adds and norms take."""
    model, ids = _model(width, seed), torch.randint(256, (BATCH, TOKENS))
    x, f = torch.randn(2, BATCH, TOKENS, width).unbind()
    gain, bias = torch.ones(width), torch.zeros(width)
    with torch.no_grad():
        runs: dict[str, Callable[[], object]] = {
            "forward": lambda: model(ids),
            "adds and norms": repeated(lambda: F.layer_norm(x + f, (width,), gain, bias), 2 * DEPTH),
        }
        return 100 * ratio(in_turns(runs, ROUNDS), "adds and norms", "forward")


def _fused_plot(cases: list[Case]) -> Plot:
    lines = []
    for met, name in ((False, "sum kept"), (True, "sum not kept")):
        points: dict[float, list[float]] = {}
        for case in cases:
            if not case.part and case.met is met:
                points.setdefault(float(case.where.split()[0]), []).append(case.value)
        lines.append(Line.over_seeds(name, points))
    levels = {"10 %": FUSED, "20 %": 20.0}
    return Plot("Time that one pass saves", "MiB a tensor", "% less time", lines, log="x", levels=levels)
