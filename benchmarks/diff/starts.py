"""Planted differences of fresh weights, and pairs of one law in other words.

What is planted follows reports: the depth scale on the wrong matrix or lost, an initialisation that no longer
reaches a layer, gains of zero.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.diff.families import Places
from benchmarks.diff.plants import Case, Truth
from benchmarks.diff.ports.blocks import Config
from benchmarks.diff.ports.decoder import Port

Law = Callable[[str, nn.Parameter], None]
GPT = Config(act="gelu", depth=4, fused=False)
LLAMA = Config(
    norm="rms", eps=1e-6, positions="halves", bias=False, bias_out=False, act="silu", gated=True,
    tied=False, fused=False, depth=4,
)  # fmt: skip
WIDE = replace(LLAMA, width=48, heads=6, kv_heads=2, hidden=128, depth=6)


def drawn(config: Config, *laws: Law) -> nn.Module:
    """A decoder whose matrices were drawn by the laws, one after the other."""
    model = Port(config)
    with torch.no_grad():
        for law in laws:
            for name, parameter in model.named_parameters():
                law(name, parameter)
    return model


def law(draw: Callable[[Tensor], Any], *ends: str) -> Law:
    """Draw the parameters whose names end so; the matrices if there is no end."""

    def apply(name: str, parameter: nn.Parameter) -> None:
        if name.endswith(ends) if ends else parameter.dim() > 1:
            draw(parameter)

    return apply


def normal(std: float) -> Callable[[Tensor], Any]:
    return partial(nn.init.normal_, std=std)


def xavier(weight: Tensor) -> None:
    nn.init.xavier_uniform_(weight)


def xavier_by_hand(weight: Tensor) -> None:
    bound = math.sqrt(6 / sum(weight.shape))
    weight.copy_((2 * torch.rand(weight.shape[::-1]).T - 1) * bound)


def by_depth(config: Config, *ends: str) -> Law:
    """The residual matrices, scaled down with depth as in GPT-2."""
    return law(normal(0.02 / math.sqrt(2 * config.depth)), *ends)


OUT, DOWN, UP = "wo.weight", "outer.weight", "other.weight"


def roles(depth: int, *names: str) -> tuple[Places, Places]:
    """Modules of the roles in all layers; "*" is any module."""
    if names == ("*",):
        return names, names
    paths = tuple(f"layers.{layer}.{name}" for layer in range(depth) for name in names)
    return paths, paths


def started(name: str, config: Config, kind: str, names: tuple[str, ...], a: list[Law], b: list[Law]) -> Case:
    """Two laws of one decoder; `names` are the modules in which they differ."""
    truths = (Truth(kind, (roles(config.depth, *names),)),) if kind else ()
    return Case(f"start: {name}", "start", partial(drawn, config, *a), partial(drawn, config, *b), truths)


def starts(config: Config) -> Iterator[Case]:
    """Planted starts."""
    base, depth = law(normal(0.02)), by_depth(config, OUT, DOWN)
    everywhere = ("*",)
    yield started("depth scale lost", config, "init depth", ("attn", "mlp"), [base, depth], [base])
    yield started(
        "a larger deviation", config, "init scale", ("attn",), [base], [base, law(normal(0.04), "wq.weight")]
    )
    yield started(
        "uniform for normal",
        config,
        "init law",
        everywhere,
        [base],
        [law(partial(nn.init.uniform_, a=-0.02 * 3**0.5, b=0.02 * 3**0.5))],
    )
    yield started(
        "gains of zero",
        config,
        "init mean",
        ("in_1", "in_2", "attn", "mlp"),
        [base],
        [base, law(nn.init.zeros_, "in_1.g", "in_2.g")],
    )
    yield started("zero output", config, "init zeros", ("attn",), [base], [base, law(nn.init.zeros_, OUT)])
    yield started(
        "truncated",
        config,
        "init law",
        everywhere,
        [base],
        [law(partial(nn.init.trunc_normal_, std=0.0227, a=-0.0454, b=0.0454))],
    )
    if config.gated:
        yield started(
            "depth scale on up, not on down",
            config,
            "init scale",
            ("mlp",),
            [base, by_depth(config, DOWN)],
            [base, by_depth(config, UP)],
        )
    yield started(
        "last layers forgotten",
        config,
        "init depth",
        everywhere,
        [base],
        [base, _in_layer(config.depth - 1, normal(0.1))],
    )


def same_starts(config: Config) -> Iterator[Case]:
    """The same law in other words."""
    base = law(normal(0.02))
    yield started(
        "scaled normal numbers", config, "", (), [base], [law(lambda w: w.copy_(torch.randn(w.shape) * 0.02))]
    )
    yield started(
        "a truncation that is far away",
        config,
        "",
        (),
        [base],
        [law(partial(nn.init.trunc_normal_, std=0.02))],
    )
    yield started("Xavier by hand", config, "", (), [law(xavier)], [law(xavier_by_hand)])
    yield started(
        "drawn twice",
        config,
        "",
        (),
        [base, by_depth(config, OUT)],
        [law(normal(1.0)), base, by_depth(config, OUT)],
    )
    other = [law(xavier), law(nn.init.ones_, ".g")]
    yield started("gains written", config, "", (), [law(xavier)], other)


def _in_layer(layer: int, draw: Callable[[Tensor], Any]) -> Law:
    def apply(name: str, parameter: nn.Parameter) -> None:
        if name.startswith(f"layers.{layer}.") and parameter.dim() > 1:
            draw(parameter)

    return apply
