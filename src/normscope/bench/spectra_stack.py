"""What `bench spectra` measures: GPT-2-small's stack as a function of its entry, with random weights."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from normscope.anatomy import measuring
from normscope.subjects import load

MODEL, TOKENS = "hf:gpt2", 128

Map = Callable[[Tensor], Tensor]


@contextmanager
def gpt2_stack(model: str = MODEL, tokens: int = TOKENS) -> Iterator[tuple[Map, Tensor]]:
    """(f, x): from the embedding's output x [1, T, d] to the last block's output, before the final norm.

    Eval mode, float32, math attention while the context is open; no parameter requires grad.
    """
    subject = load(model, batch_size=1, seq_len=tokens)
    network: Any = subject.model.requires_grad_(False)
    body, ids = network.transformer, cast(Mapping[str, Tensor], subject.batch)["input_ids"]

    def stack(x: Tensor) -> Tensor:
        for block in body.h:
            x = block(x)
        return x

    with measuring(subject.model):
        yield stack, (body.wte(ids) + body.wpe(torch.arange(ids.shape[1]))).detach()


def seconds(run: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def seconds_of_forward(f: Map, x: Tensor, times: int) -> float:
    """Median wall time of one plain forward, without a graph."""
    with torch.no_grad():
        return statistics.median(seconds(lambda: f(x)) for _ in range(times))
