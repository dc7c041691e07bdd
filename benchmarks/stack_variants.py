"""Variants of a stack's step, in milliseconds of processor time per step and replica.

    OMP_NUM_THREADS=1 python -m benchmarks.stack_variants [SPEC] [K …]

The gradient is taken inside vmap (`grad_and_value`), or outside it by one backward of the summed losses.
Fused attention has no batching rule; it runs once per replica ("looped"), is replaced by its formula
("math"), or has K folded into its batch ("folded", as in `TrialStack`). The optimiser is left out. The
variants take turns.
"""

import contextlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from normscope.subjects import Subject, load
from normscope.train.stack_forward import _FoldedAttention, stack_batches

SPEC = "nn:decoder,scheme=post,depth=6,width=32,heads=2"
ROUNDS = 10
ATTENTION: dict[str, Callable[[], Any]] = {
    "looped": contextlib.nullcontext,
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
    "folded": _FoldedAttention,
}


def lone(subject: Subject) -> Callable[[], None]:
    """Forward and backward of one model."""

    def step() -> None:
        subject.model.zero_grad(set_to_none=True)
        subject.loss().backward()

    return step


def stacked(subject: Subject, size: int, attention: str, inside: bool) -> Callable[[], None]:
    """Forward and backward of a stack of copies of the model."""
    parameters, buffers = stack_module_state([subject.model] * size)
    batch = stack_batches([subject.batch] * size)

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], batch: Any) -> Tensor:
        return functional_call(_Loss(subject), _within(parameters | buffers), (batch,))

    def step() -> None:
        with ATTENTION[attention]():
            if inside:
                vmap(grad_and_value(loss), randomness="different")(parameters, buffers, batch)
                return
            for parameter in parameters.values():
                parameter.grad = None
            vmap(loss, randomness="different")(parameters, buffers, batch).sum().backward()

    return step


class _Loss(nn.Module):
    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model, self._loss = subject.model, subject.loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(batch, self.model)


def _within(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in state.items()}


def milliseconds(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median time of each step in milliseconds, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            began = time.process_time()
            step()
            times[name].append(1e3 * (time.process_time() - began))
    return {name: statistics.median(found[2:]) for name, found in times.items()}


def main(spec: str = SPEC, *sizes: str) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*batching rule")
    subject = load(spec)
    print(
        f"{spec}\n{'K':>3} {'one by one':>11}",
        *(f"{a + ', ' + w:>16}" for w in ("inside", "outside") for a in ATTENTION),
    )
    for size in map(int, sizes or ("4", "8", "16", "32")):
        steps = {"lone": lone(subject)}
        for inside in (True, False):
            for attention in ATTENTION if not inside else ("looped", "math"):
                steps[f"{attention} {inside}"] = stacked(subject, size, attention, inside)
        found = milliseconds(steps)
        figures = [found.get(f"{attention} {inside}") for inside in (True, False) for attention in ATTENTION]
        words = ["—" if figure is None else f"{figure / size:.2f}" for figure in figures]
        print(f"{size:>3} {found['lone']:>11.2f}", *(f"{word:>16}" for word in words), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
