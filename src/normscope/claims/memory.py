"""What the placement of the norm costs in memory.

Shapes: B batch, T tokens.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from normscope.claims.allocations import cuda_peak_bytes, kept_for_backward, num_bytes, peak_bytes
from normscope.claims.claim import Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.plots import Line, Plot
from normscope.claims.setup import Setup
from normscope.claims.sources import Source
from normscope.nn import build
from normscope.nn.models import Model

DEPTHS, BATCH, TOKENS = (2, 8), 2, 64
KINDS = (("layernorm", 64), ("layernorm", 128), ("rmsnorm", 64))
"""Norms and widths."""
LEAST = 5.0
"""Per cent: the lower end of what the text promises."""


@claim(
    "B12",
    Source("003", "§2.3", "训练峰值显存可再降 5-10 %"),
    says="Pre-LN needs 5 to 10 % less peak memory in training than Post-LN.",
    asks="the peak of an AdamW step (weights, gradients, optimiser and activations) is at least 5 % "
    "lower with the norms before the branches than after the adds: same kernels, 2 and 8 blocks, two widths, "
    "LayerNorm and RMSNorm",
    parts={
        "activations": Sentence("What is kept for the backward pass is at least 5 % less in Pre-LN."),
        "reason": Sentence("In Pre-LN what goes into a norm need not be kept for the backward pass."),
        "inference": Sentence("Inference needs at least 5 % less peak memory in Pre-LN."),
    },
)
def memory_of_placements(setup: Setup) -> Evidence:
    """Bytes in both placements: of a step, of what autograd keeps, of the norms' inputs, of inference."""
    cases = [case for seed in setup.seeds for case in _placement_cases(seed)]
    unmeasured = [] if torch.cuda.is_available() else ["CUDA's allocator: no GPU here"]
    kept = [case.value for case in cases if case.part == "reason"]
    saved = [case.value for case in cases if case.part == "activations"]
    inference = [case.value for case in cases if case.part == "inference"]
    return Evidence(
        cases=cases,
        figure=Figure.largest("most of its peak memory that Pre-LN saves, in %", cases),
        plots=[_by_depth(cases)],
        notes=[
            f"Pre-LN keeps at least {min(kept):.3g} % of the inputs of its norms: their backward pass "
            "asks for them.",
            f"What is kept for the backward pass changes by {-max(saved):+.2g} to {-min(saved):+.2g} % from "
            "Post-LN to Pre-LN; Pre-LN has one norm more, the final one.",
            f"In inference it takes {-max(inference):.3g} to {-min(inference):.3g} % more: what the branch "
            "reads stands beside the stream, where in Post-LN it is the stream.",
        ],
        unmeasured=unmeasured,
        of="models",
    )


def _placement_cases(seed: int) -> Iterator[Case]:
    for norm, width in KINDS:
        for depth in DEPTHS:
            where = f"{norm}, d = {width}, {depth} blocks"
            pre, post = (Bytes(scheme, norm, width, depth, seed) for scheme in ("pre", "post"))
            for part, value in (
                ("", less(pre.step, post.step)),
                ("activations", less(pre.activations, post.activations)),
                ("inference", less(pre.inference, post.inference)),
            ):
                yield Case(seed=seed, where=where, value=value, holds=value >= LEAST, part=part)
            share = 100 * pre.norm_inputs_kept
            yield Case(seed=seed, where=where, value=share, holds=share < 100, part="reason")


def less(this: float, that: float) -> float:
    """By how many per cent `this` is less than `that`."""
    return 100 * (that - this) / that


class Bytes:
    """What one model takes.

    Attributes:
        step: peak of an AdamW step, all included.
        activations: kept for the backward pass, without parameters and ids.
        inference: peak of a forward pass without gradients, above the weights.
        norm_inputs_kept: share of the norms whose input is kept for the backward pass.
    """

    def __init__(self, scheme: str, norm: str, width: int, depth: int, seed: int) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        measure = cuda_peak_bytes if device == "cuda" else peak_bytes
        torch.manual_seed(seed)
        model = build(
            "decoder", scheme=scheme, norm=norm, width=width, depth=depth, heads=4, context=TOKENS
        ).to(device)
        ids = torch.randint(256, (BATCH, TOKENS), device=device)
        kept, inputs = _kept_and_norm_inputs(model, ids)
        self.activations = sum(kept.values())
        self.norm_inputs_kept = sum(address in kept for address in inputs) / len(inputs)
        self.step = step_peak(model, ids, measure)
        with torch.no_grad():
            self.inference = measure(lambda: model(ids))


def _kept_and_norm_inputs(model: Model, ids: Tensor) -> tuple[dict[int, int], list[int]]:
    """What the forward pass keeps, and the addresses of what went into the norms."""
    inputs: list[Tensor] = []  # held, so that no address comes twice
    hooks = [
        module.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        for module in model.modules()
        if isinstance(module, nn.LayerNorm | nn.RMSNorm)
    ]
    kept = kept_for_backward(lambda: model(ids, ids).loss, [*model.parameters(), ids])
    for hook in hooks:
        hook.remove()
    return kept, [tensor.untyped_storage().data_ptr() for tensor in inputs]


def step_peak(model: Model, ids: Tensor, measure: Callable[[Callable[[], object]], int]) -> int:
    """Peak bytes of an AdamW step: what stays between steps, and what the step holds beside it."""
    step = training_step(model, ids)
    step()  # makes the optimiser's state
    model.zero_grad()
    stays = 3 * num_bytes(model.parameters())  # weights and two moments
    return stays + measure(step)


def training_step(model: Model, ids: Tensor, **options: Any) -> Callable[[], None]:
    """Forward, backward, AdamW; gradients are let go at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)

    def step() -> None:
        model(ids, ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _by_depth(cases: list[Case]) -> Plot:
    names = {"": "peak of a step", "activations": "kept for the backward pass", "inference": "inference"}
    lines = []
    for part, name in names.items():
        points: dict[float, list[float]] = {}
        for case in cases:
            if case.part == part:
                points.setdefault(float(case.where.split()[-2]), []).append(case.value)
        lines.append(Line.over_seeds(name, points))
    return Plot("Memory that Pre-LN saves", "blocks", "% less than Post-LN", lines, levels={"5 %": LEAST})
