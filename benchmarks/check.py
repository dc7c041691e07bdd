"""`normscope bench check`: cost of a check, in training steps of the model.

The model is GPT-2 124M (Hugging Face, random weights) on 4 × 64 tokens. Time and peak memory of the whole
default check, including the forecast, are relative to a float32 AdamW training step of that model on that
batch. σ_max of the 12-layer stack at T = 128 is relative to forwards of that stack. Times are medians of
steps before and after the check; memory is the peak resident set of a new process minus that of the imports.
"""

import resource
import statistics
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from benchmarks.process import Row, circumstances, in_fresh_process, row, seconds
from benchmarks.spectra.stack import MODEL, TOKENS, between, seconds_of_forward, stack_of
from normscope.anatomy import measuring
from normscope.linalg import JacobianOperator, sigma_max
from normscope.pipeline import check
from normscope.probes.jacobian import CONFIDENCE
from normscope.subjects import load

STEPS_EACH_SIDE = 5
REFERENCE_PRODUCTS = 200


def bench_check() -> list[Row]:
    """Rows with figures and targets, each from a new process."""
    timed, step, whole, sigma = map(
        in_fresh_process, (time_of_check, peak_of_steps, peak_of_check, sigma_cost)
    )
    return [
        row(
            "whole default check of GPT-2 124M, in training steps",
            f"{timed['check_s'] / timed['step_s']:.1f}",
            "≤ 40",
            f"check {timed['check_s']:.1f} s, median step {timed['step_s']:.3f} s, "
            f"{timed['threads']} threads, {timed['allocator']}",
        ),
        row(
            "peak memory of the check, in training steps' peaks",
            f"{whole / step:.2f}",
            "≤ 3",
            f"check {whole:.0f} MiB, step {step:.0f} MiB above the imported libraries",
        ),
        row(
            "σ_max of the 12-layer stack at T = 128, in forwards of the stack",
            f"{sigma['sigma_s'] / sigma['forward_s']:.1f}",
            "≤ 25",
            f"{sigma['products']} products and set-up; forward {1e3 * sigma['forward_s']:.0f} ms",
        ),
        row(
            "the same in forwards of the whole model, head included",
            f"{sigma['sigma_s'] / sigma['whole_forward_s']:.1f}",
            "≤ 25",
            f"forward {1e3 * sigma['whole_forward_s']:.0f} ms",
        ),
        row(
            f"its relative error, against {sigma['reference_products']} products",
            f"{abs(sigma['value'] / sigma['reference'] - 1):.1e}",
            "≤ 1e-2",
            f"{sigma['value']:.5g} against {sigma['reference']:.5g}",
        ),
    ]


def _training_step() -> Callable[[], None]:
    subject = load(MODEL)
    subject.model.train()
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=3e-4)

    def step() -> None:
        optimizer.zero_grad()
        subject.loss().backward()
        optimizer.step()

    return step


def time_of_check() -> dict[str, Any]:
    """Time a check between two series of training steps, so that a slow phase of the machine affects it."""
    step = _training_step()
    step()  # the first step creates Adam's moments
    steps = [seconds(step).wall for _ in range(STEPS_EACH_SIDE)]
    subject = load(MODEL)
    check_s = seconds(lambda: check(subject)).wall
    steps += [seconds(step).wall for _ in range(STEPS_EACH_SIDE)]
    return {"check_s": check_s, "step_s": statistics.median(steps), **circumstances()}


def peak_of_steps() -> float:
    """Peak memory of training steps in MiB."""

    def run() -> None:
        step = _training_step()
        for _ in range(3):
            step()

    return _peak(run)


def peak_of_check() -> float:
    """Peak memory of a check in MiB."""
    return _peak(lambda: check(load(MODEL)))


def _peak(run: Callable[[], object]) -> float:
    """Peak resident memory of `run` in MiB, minus that of the imported libraries."""
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401  (imported to be part of the baseline)

    baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - baseline) / 1024


def sigma_cost() -> dict[str, Any]:
    """Time of σ_max, including all set-up, between two series of plain forwards."""
    subject = load(MODEL, batch_size=1, seq_len=TOKENS)
    with measuring(subject.model):
        stack, entry = stack_of(subject)
        ids = cast(Mapping[str, torch.Tensor], subject.batch)["input_ids"]
        stack(entry)
        ours, spent = between(
            lambda: sigma_max(JacobianOperator(stack, entry), tol=1e-2, confidence=CONFIDENCE["stack"]),
            stack,
            entry,
            3 * STEPS_EACH_SIDE,
        )
        whole = seconds_of_forward(lambda ids: subject.model(input_ids=ids), ids, 3 * STEPS_EACH_SIDE)
        op = JacobianOperator(stack, entry)
        reference = sigma_max(op, tol=1e-12, max_products=REFERENCE_PRODUCTS)
    return {
        "sigma_s": spent["seconds"],
        "forward_s": spent["forward_s"],
        "whole_forward_s": whole.wall,
        "products": ours.products,
        "value": ours.value,
        "reference": reference.value,
        "reference_products": reference.products,
    }
