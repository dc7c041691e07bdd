"""What scales the stream from outside: smaller last maps, a norm at the end."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from normscope.claims.at_start import (
    blocks_of,
    decoder,
    down_gradients,
    noise,
    slope,
    stack_of,
    stream_by_block,
    streams_of,
    variance,
    weight_of,
)
from normscope.claims.form import Case, Evidence, Figure, Kind, Line, Plot, Setup, Source, claim
from normscope.claims.training import Recipe, effects, mean_by_seed, saved_nats
from normscope.nn import Decoder, build

LENGTHS = (4, 8, 16, 32, 64)
INITS = ("xavier", "normal")
COUNTS = {"L layers": 1, "2L branches": 2}
SAVES = 0.05
"""Nats: the smallest that counts."""
LEVEL = 0.1
"""Largest exponent in L of what is the same at every depth."""


@claim(
    "C15",
    Source("004", "§5.4.2", "除以 $\\sqrt{\\text{layer\\_depth}}$"),
    Source("004", "§5.4.2", "确保了深层网络中梯度的尺度保持恒定"),
    Source("004", "§7", "通常建议将残差层的输出方差保持在1附近"),
    says="GPT-2's division of the last maps by √N keeps the stream's variance as it was at entry.",
    asks="the variance after 12 blocks of GPT-2 as it starts, on its own embeddings N(0, 0.02²), is within a "
    "factor 2 of that at entry; width 64 and 256",
    parts={
        "depth": "On a stream of variance 1 the end's variance is the same at any depth: exponent in L of 4 "
        "… 64 Pre-LN blocks within 0.1 of zero, N = L or 2L.",
        "one": "It is then that at entry, within 10 %.",
        "gradient": "The scale of the last block's gradient is then the same at every depth.",
    },
)
def scaled_start(setup: Setup) -> Evidence:
    """Variance and gradient by depth under 1/√L, 1/√(2L) and nothing; GPT-2's own start."""
    found = {seed: {name: _ends(name, seed) for name in (*COUNTS, "nothing")} for seed in setup.seeds}
    cases = [case for seed, ends in found.items() for case in _scaled_cases(seed, ends)]
    cases += setup.cases(_gradient_cases)
    own = {(seed, width): _own_growth(seed, width) for seed in setup.seeds for width in (64, 256)}
    cases += [
        Case(seed, f"gpt2, 12 blocks, d = {width}", v, 0.5 <= v <= 2) for (seed, width), v in own.items()
    ]
    return Evidence(
        cases,
        Figure(
            "variance after 12 blocks of GPT-2 over that at entry, d = 256",
            {seed: own[seed, 256] for seed in setup.seeds},
        ),
        plots=[_ends_plot(found)],
        notes=[
            f"Variance after {LENGTHS[-1]} blocks: "
            + ", ".join(f"{_mean(found, name):.3g} by {name}" for name in found[setup.seeds[0]])
            + "."
        ],
    )


def divide_last_maps(module: nn.Module, num_branches: int) -> None:
    """The last map of each branch over √N."""
    with torch.no_grad():
        for block in blocks_of(module):
            weight_of(block.attention.o).mul_(num_branches**-0.5)
            weight_of(block.feed_forward.down).mul_(num_branches**-0.5)


def _ends(name: str, seed: int) -> list[float]:
    """Variance after `LENGTHS` blocks, over that at entry."""
    ends = []
    for depth in LENGTHS:
        stack = stack_of("pre", depth, seed, width=64, init="xavier")
        if name in COUNTS:
            divide_last_maps(stack, COUNTS[name] * depth)
        streams = stream_by_block(stack, noise(64, seed))
        ends.append(variance(streams[-1]) / variance(streams[0]))
    return ends


def _scaled_cases(seed: int, ends: Mapping[str, Sequence[float]]) -> Iterator[Case]:
    for name in COUNTS:
        p, last = slope(LENGTHS, ends[name]), ends[name][-1]
        yield Case(seed, f"N = {name}, exponent in L", p, abs(p) <= LEVEL, "depth")
        where = f"N = {name}, {LENGTHS[-1]} blocks"
        yield Case(seed, where, last, abs(last - 1) <= 0.1, "one")


def _gradient_cases(seed: int) -> Iterator[Case]:
    for name, count in COUNTS.items():
        last = []
        for depth in LENGTHS:
            model, ids, labels = decoder("pre", depth, seed, width=64)
            divide_last_maps(model, count * depth)
            last.append(down_gradients(model, ids, labels)[-1])
        p = slope(LENGTHS, last)
        where = f"N = {name}, exponent in L of ‖∇W₂‖"
        yield Case(seed, where, p, abs(p) <= LEVEL, "gradient")


def _own_growth(seed: int, width: int) -> float:
    torch.manual_seed(seed)
    model = build("decoder", scheme="gpt2", depth=12, width=width, heads=4, vocab=256, context=32)
    streams = streams_of(model, seed)
    return variance(streams[-1]) / variance(streams[0])


def _mean(found: Mapping[int, Mapping[str, Sequence[float]]], name: str) -> float:
    return sum(ends[name][-1] for ends in found.values()) / len(found)


def _ends_plot(found: Mapping[int, Mapping[str, Sequence[float]]]) -> Plot:
    lines = [
        Line.over_seeds(
            name, {depth: [ends[name][k] for ends in found.values()] for k, depth in enumerate(LENGTHS)}
        )
        for name in (*COUNTS, "nothing")
    ]
    title = "The stream's variance after L Pre-LN blocks"
    return Plot(title, "blocks L", "variance / at entry", lines, log="xy", levels={"kept": 1})


@claim(
    "C18",
    Source("004", "§5.3.2", "在最终输出层额外增加一个LayerNorm来缓解"),
    Source("001", "§3", "由于没有最后的 LayerNorm 限制，深层的输出幅度（Magnitude）可能会变得非常大"),
    says="A norm after the last block makes a Pre-LN model end better.",
    asks="trained for 300 steps at 3e-3, 6 blocks, the mean of the last 20 losses is at least 0.05 nats "
    "lower with it than without; beside it the exponent in L of the output's mean square, L = 4 … 64, which "
    "is within 0.05 of zero with the norm and at least ½ without, from two kinds of weights",
    smallest=SAVES,
    kind=Kind.TENDENCY,
    parts={
        "scale": "It repairs the scale of the output.",
        "without": "Without it the output grows with depth.",
    },
)
def final_norm(setup: Setup) -> Evidence:
    """Paired losses; the output's mean square by depth with and without the final norm."""
    found = {
        seed: {(scheme, init): _outputs(scheme, init, seed) for scheme in FINALS for init in INITS}
        for seed in setup.seeds
    }
    runs = [Recipe(scheme="pre-no-final", depth=6), Recipe(scheme="pre", depth=6)]
    saved = effects(setup, runs, saved_nats, "6 blocks, nats that it saves", smallest=SAVES, replicas=1)
    return Evidence(
        [*saved, *(case for seed, outputs in found.items() for case in _output_cases(seed, outputs))],
        Figure("nats that a final norm saves", mean_by_seed(saved)),
        plots=[_output_plot(found)],
        unmeasured=["its effect on fine-tuning on another task, of which 004 speaks"],
    )


FINALS = ("pre", "pre-no-final")


def _outputs(scheme: str, init: str, seed: int) -> list[float]:
    """Mean square of what the head reads, by depth."""
    squares = []
    for depth in LENGTHS:
        torch.manual_seed(seed)
        model = build("decoder", scheme=scheme, depth=depth, width=64, init=init, vocab=64, context=16)
        assert isinstance(model, Decoder)
        ids = torch.randint(64, (4, 16))
        with torch.no_grad():
            x_BTD = model.run(model.embedding(ids, torch.arange(16)[None]))
        squares.append(float(x_BTD.square().mean()))
    return squares


def _output_cases(seed: int, outputs: Mapping[tuple[str, str], Sequence[float]]) -> Iterator[Case]:
    for (scheme, init), squares in outputs.items():
        p = slope(LENGTHS, squares)
        has = scheme == "pre"
        holds = abs(p) <= 0.05 if has else p >= 0.5
        where = f"{scheme}, {init} weights, exponent in L"
        yield Case(seed, where, p, holds, "scale" if has else "without")


def _output_plot(found: Mapping[int, Mapping[tuple[str, str], Sequence[float]]]) -> Plot:
    lines = [
        Line.over_seeds(
            f"{scheme}, {init}",
            {depth: [o[scheme, init][k] for o in found.values()] for k, depth in enumerate(LENGTHS)},
        )
        for scheme in FINALS
        for init in INITS
    ]
    return Plot("What the head reads, at the start", "blocks L", "mean square", lines, log="xy")
