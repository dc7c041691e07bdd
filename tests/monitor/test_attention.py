"""Attention figures of a run: against a dense reference, and what the run keeps."""

from typing import Any

import numpy as np
import pytest
import torch
from test_monitor import SPECS, Loop
from torch import Tensor, nn

from normscope.anatomy import Anatomy, capture, measuring, read_anatomy
from normscope.monitor import Monitor
from normscope.subjects import call_model

Figures = dict[tuple[str, str], float]


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "dropout_p", "attn_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def dense(logits: Tensor) -> tuple[float, float]:
    """Largest |logit| and mean entropy over log(visible) of queries (…, S), by brute force in float64."""
    largest, entropies = 0.0, []
    for row in logits.double().flatten(0, -2):
        seen = row[row > -1e4]
        if len(seen):
            largest = max(largest, float(seen.abs().max()))
        if len(seen) > 1:
            p = torch.softmax(seen, 0)
            entropies.append(float(-(p * p.log()).sum() / np.log(len(seen))))
    return largest, float(np.mean(entropies))


def reference(model: nn.Module, anatomy: Anatomy, batch: Any) -> Figures:
    """Figures of a sample of two sequences and 8 queries, from logits that a dispatch mode captures."""
    sites = {b.site: b.attention[0].logits for b in anatomy.branches if b.attention}
    with measuring(model):
        _, found = capture(model, lambda: call_model(model, batch), sites.values())
    expected: Figures = {}
    for site, place in sites.items():
        logits = found[place].detach()
        sequences = [0, len(logits) // 2] if len(logits) > 1 else [0]
        tokens = logits.shape[2]
        step = max(1, tokens // 8)
        queries = [t for t in range(tokens) if (tokens - 1 - t) % step == 0][-8:]
        sample = logits[sequences][:, :, queries]
        expected["attention/max-logit", site], expected["attention/entropy", site] = dense(sample)
        for head in range(logits.shape[1]):
            each = f"{site}.head{head}"
            one = dense(sample[:, head])
            expected["attention/head-max-logit", each], expected["attention/head-entropy", each] = one
    return expected


def measured(loop: Loop, steps: int = 1, **options: Any) -> Figures:
    """Attention figures of the last step with all figures."""
    rows: list[Figures] = []
    with Monitor(loop.model, loop.optimizer, on_alarm=lambda _: None, **options) as monitor:
        feed = monitor._judges.feed

        def heard(step: int, layout: Any, values: Any) -> Any:
            if any(quantity.startswith("attention/") for quantity, _ in layout):
                rows.append(dict(zip(layout, values, strict=True)))
            return feed(step, layout, values)

        monitor._judges.feed = heard  # type: ignore[method-assign]
        for _ in range(steps):
            loop.step(monitor)
    assert monitor.failure is None, monitor.failure
    return {key: value for key, value in rows[-1].items() if key[0].startswith("attention/")}


@pytest.mark.parametrize("spec", SPECS)
def test_figures_are_those_of_the_dense_reference(spec: str) -> None:
    loop = Loop(spec, torch.optim.SGD)
    without_dropout(loop.model)
    batch = next(loop.batches)
    loop.batches = iter([batch])
    expected = reference(loop.model, read_anatomy(loop.model, batch), batch)
    found = measured(loop)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-5)
