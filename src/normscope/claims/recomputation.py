"""Recomputation: time for memory.

Shapes: B batch, T tokens.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from normscope.claims.allocations import kept_for_backward
from normscope.claims.claim import Kind, Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.memory import less
from normscope.claims.plots import Line, Plot
from normscope.claims.setup import Setup
from normscope.claims.sources import Source
from normscope.claims.timing import HOW, in_turns, ratio
from normscope.nn import build
from normscope.nn.models import Decoder, Model

SIZES = ((4, 64), (2, 256))
"""Blocks and widths."""
BATCH, TOKENS, ROUNDS = 4, 64, 11
WIDE = 256
"""From here on the products outweigh what a call of Python costs."""
SAVED, TIME = (40.0, 50.0), (20.0, 40.0)
"""Per cent: what the text says of memory; about 30 for time."""


@claim(
    "C21",
    Source("004", "§9", "约增加30%的前向计算时间"),
    Source("004", "§9", "减少40%-50%的激活值显存占用"),
    says="Recomputing the branches saves 40 % or more of the activations' memory for about 30 % more time.",
    asks="with each block run again in the backward pass at least 40 % less is kept, and the "
    "forward and backward pass together take 20 to 40 % longer",
    condition="the width is 256 or more",
    kind=Kind.TENDENCY,
    parts={
        "memory": Sentence("What is saved is between 40 and 50 %."),
        "forward": Sentence("The forward computation grows by about 30 % (20 to 40)."),
        "sum": Sentence("Without recomputation, y = x + f(x) has to keep f(x) for the backward pass."),
        "half": Sentence(
            "40 to 50 % saved, by every second block, is about 30 % more to compute (20 to 40)."
        ),
    },
    alone=True,
)
def recomputation(setup: Setup) -> Evidence:
    """Bytes kept, operations and times of a step, without, with half and with all blocks run again."""
    cases = [case for seed in setup.seeds for case in _cases(seed)]
    means = {
        part: _mean([case for case in cases if case.met], part) for part in ("", "memory", "forward", "half")
    }
    return Evidence(
        cases=cases,
        figure=Figure(f"extra time of forward and backward at d = {WIDE}, in %", _by_seed(cases)),
        plots=[_plot(cases)],
        notes=[
            f"All blocks run again at d = {WIDE}: {means['memory']:.3g} % of the activations saved, "
            f"{means['']:.3g} % more time, {means['forward']:.3g} % more forward operations: the text's 30 % "
            "are of both passes together, not of the forward one.",
            f"With every second block run again: {means['half']:.3g} % more operations of both passes.",
            HOW,
        ],
        of="models",
    )


def _cases(seed: int) -> Iterator[Case]:
    for depth, width in SIZES:
        where = f"{depth} blocks, d = {width}"
        none, half, all_of_them = (_model(depth, width, seed, every) for every in (0, 2, 1))
        ids = torch.randint(256, (BATCH, TOKENS))
        kept, work = ([measure(m, ids) for m in (none, half, all_of_them)] for measure in (_kept, _work))
        part_saved, saved = less(kept[1], kept[0]), less(kept[2], kept[0])
        taken = in_turns({"none": _step(none, ids), "all": _step(all_of_them, ids)}, ROUNDS)
        time = 100 * (ratio(taken, "all", "none") - 1)
        forward = 100 * (work[2] - work[0]) / _operations(lambda m=none, ids=ids: m(ids, ids))  # type: ignore[misc]
        more = 100 * (work[1] / work[0] - 1)
        for part, said, value, holds in (
            ("", f"{where}, {saved:.3g} % saved", time, saved >= SAVED[0] and _in(time, TIME)),
            ("memory", where, saved, _in(saved, SAVED)),
            ("forward", where, forward, _in(forward, TIME)),
            ("half", f"{where}, {part_saved:.3g} % saved", more, _in(part_saved, SAVED) and _in(more, TIME)),
        ):
            yield Case(seed=seed, where=said, value=value, holds=holds, met=width >= WIDE, part=part)
    kept_by_sum = _kept_by_sum(seed)
    yield Case(seed=seed, where="x + f(x)", value=kept_by_sum, holds=kept_by_sum > 0, part="sum")


def _in(value: float, interval: tuple[float, float]) -> bool:
    return interval[0] <= value <= interval[1]


def _model(depth: int, width: int, seed: int, every: int) -> Model:
    """Pre-LN; each `every`-th block is run again in the backward pass, none for 0."""
    torch.manual_seed(seed)
    model = build(
        "decoder", scheme="pre", depth=depth, width=width, heads=4, context=TOKENS, checkpoint=every == 1
    )
    assert isinstance(model, Decoder)
    if every > 1:
        for block in list(model.blocks)[every - 1 :: every]:
            plain = block.forward
            block.forward = _again(plain)
    return model


def _again(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda state, context: checkpoint(plain, state, context, use_reentrant=False)


def _step(model: Model, ids: Tensor) -> Callable[[], None]:
    """Forward and backward; gradients are let go at the end."""

    def step() -> None:
        model(ids, ids).loss.backward()
        model.zero_grad()

    return step


def _kept(model: Model, ids: Tensor) -> int:
    """Bytes that stay for the backward pass."""
    return sum(kept_for_backward(lambda: model(ids, ids).loss, [*model.parameters(), ids]).values())


def _operations(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def _work(model: Model, ids: Tensor) -> int:
    """Operations of both passes."""
    return _operations(lambda: model(ids, ids).loss.backward())


def _kept_by_sum(seed: int) -> float:
    """Bytes that autograd keeps for the backward pass of x + f."""
    x, f = torch.randn(2, BATCH, TOKENS, 64, generator=torch.Generator().manual_seed(seed)).unbind()
    return float(sum(kept_for_backward(lambda: x.requires_grad_() + f.requires_grad_()).values()))


def _mean(cases: list[Case], part: str) -> float:
    values = [case.value for case in cases if case.part == part]
    return sum(values) / len(values)


def _by_seed(cases: list[Case]) -> dict[int | None, float]:
    wide = [case for case in cases if case.met]
    return {seed: _mean([case for case in wide if case.seed == seed], "") for seed in {c.seed for c in wide}}


def _plot(cases: list[Case]) -> Plot:
    lines = []
    for part, name in (("", "all blocks, time"), ("half", "every second block, operations")):
        points = [(float(case.where.split()[-3]), case.value) for case in cases if case.part == part]
        lines.append(Line(name, [x for x, _ in points], [y for _, y in points], marks=True))
    return Plot(
        "What recomputation saves and costs",
        "activations' memory saved, %",
        "more, %",
        lines,
        levels={"30 %": 30.0},
    )
