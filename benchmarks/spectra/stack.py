"""The subject of `bench spectra`: GPT-2-small's stack as a function of its input, with random weights."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.process import Seconds, seconds
from normscope.anatomy import measuring
from normscope.subjects import Subject, load

MODEL, TOKENS = "hf:gpt2", 128

Map = Callable[[Tensor], Tensor]


@contextmanager
def gpt2_stack(model: str = MODEL, tokens: int = TOKENS) -> Iterator[tuple[Map, Tensor]]:
    """`stack_of` a GPT-2 in eval mode and float32, with math attention in the context."""
    subject = load(model, batch_size=1, seq_len=tokens)
    with measuring(subject.model):
        yield stack_of(subject)


def stack_of(subject: Subject) -> tuple[Map, Tensor]:
    """(f, x): from the embedding's output x [1, T, d] to the last block's output, before the final norm.

    No parameter of the GPT-2 requires grad afterwards.
    """
    network: Any = subject.model.requires_grad_(False)
    body, ids = network.transformer, cast(Mapping[str, Tensor], subject.batch)["input_ids"]

    def stack(x: Tensor) -> Tensor:
        for block in body.h:
            x = block(x)
        return x

    return stack, (body.wte(ids) + body.wpe(torch.arange(ids.shape[1]))).detach()


def seconds_of_forward(f: Map, x: Tensor, times: int) -> Seconds:
    """Median times of one plain forward, without a graph."""
    with torch.no_grad():
        spent = [seconds(lambda: f(x)) for _ in range(times)]
    return Seconds(*(statistics.median(each) for each in zip(*spent, strict=True)))


def between(run: Callable[[], Any], f: Map, x: Tensor, times: int) -> tuple[Any, dict[str, float]]:
    """Result of a call, with its time and that of a forward, in seconds.

    Forwards run before and after the call, so that a slow phase of the machine affects both.
    """
    result = []
    before = seconds_of_forward(f, x, times)
    spent = seconds(lambda: result.append(run()))
    after = seconds_of_forward(f, x, times)
    return result[0], {
        "seconds": spent.wall,
        "forward_s": (before.wall + after.wall) / 2,
        "cpu_s": spent.cpu,
        "forward_cpu_s": (before.cpu + after.cpu) / 2,
    }
