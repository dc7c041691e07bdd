"""The parts of `bench check`, each a process: `python -m normscope.bench.check_parts NAME`."""

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from normscope.bench.process import circumstances

MODEL = "hf:gpt2"
STEPS_EACH_SIDE = 5
REFERENCE_PRODUCTS = 200


def _training_step() -> tuple[Callable[[], None], Any]:
    from normscope.subjects import load

    subject = load(MODEL)
    subject.model.train()
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=3e-4)

    def step() -> None:
        optimizer.zero_grad()
        subject.loss().backward()
        optimizer.step()

    return step, subject


def _timed(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _time() -> dict[str, Any]:
    """The check between two rows of training steps, so that a slow spell of the machine falls on both."""
    from normscope.pipeline import check
    from normscope.subjects import load

    step, _ = _training_step()
    step()  # the first one makes Adam's moments
    steps = [_timed(step) for _ in range(STEPS_EACH_SIDE)]
    subject = load(MODEL)
    check_s = _timed(lambda: check(subject))
    steps += [_timed(step) for _ in range(STEPS_EACH_SIDE)]
    return {"check_s": check_s, "step_s": statistics.median(steps), **circumstances()}


def _memory(run: Callable[[], Any]) -> dict[str, Any]:
    """Peak resident memory of `run` over what the imported libraries already take."""
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401  (the import is the point: it counts as baseline)

    import normscope.pipeline  # noqa: F401

    baseline = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    return {"peak_mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - baseline) / 1024}


def _memory_of_steps() -> None:
    step, _ = _training_step()
    for _ in range(3):
        step()


def _memory_of_check() -> None:
    from normscope.pipeline import check
    from normscope.subjects import load

    check(load(MODEL))


def _sigma() -> dict[str, Any]:
    """σ_max from nothing (graphs, finite differences, products) between rows of plain forwards."""
    from normscope.anatomy import measuring
    from normscope.linalg import JacobianOperator, sigma_max
    from normscope.probes.jacobian import CONFIDENCE
    from normscope.subjects import load

    subject = load(MODEL, batch_size=1, seq_len=128)
    model: Any = subject.model.requires_grad_(False)
    transformer, ids = model.transformer, cast(Mapping[str, torch.Tensor], subject.batch)["input_ids"]
    positions = torch.arange(ids.shape[1])
    entry = (transformer.wte(ids) + transformer.wpe(positions)).detach()

    def stack(x: torch.Tensor) -> torch.Tensor:
        for block in transformer.h:
            x = block(x)
        return x

    def forward() -> None:
        with torch.no_grad():
            stack(entry)

    def whole_forward() -> None:
        with torch.no_grad():
            model(input_ids=ids)

    with measuring(subject.model):
        forward()
        forwards = [_timed(forward) for _ in range(3 * STEPS_EACH_SIDE)]
        start = time.perf_counter()
        found = sigma_max(JacobianOperator(stack, entry), tol=1e-2, confidence=CONFIDENCE["stack"])
        sigma_s = time.perf_counter() - start
        forwards += [_timed(forward) for _ in range(3 * STEPS_EACH_SIDE)]
        whole = [_timed(whole_forward) for _ in range(3 * STEPS_EACH_SIDE)]
        reference = sigma_max(JacobianOperator(stack, entry), tol=1e-12, max_products=REFERENCE_PRODUCTS)
    return {
        "sigma_s": sigma_s,
        "forward_s": statistics.median(forwards),
        "whole_forward_s": statistics.median(whole),
        "products": found.products,
        "value": found.value,
        "reference": reference.value,
        "reference_products": reference.products,
    }


if __name__ == "__main__":
    _PARTS: dict[str, Callable[[], dict[str, Any]]] = {
        "time": _time,
        "memory-step": lambda: _memory(_memory_of_steps),
        "memory-check": lambda: _memory(_memory_of_check),
        "sigma": _sigma,
    }
    print(json.dumps(_PARTS[sys.argv[1]]()))
