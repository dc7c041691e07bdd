"""Generation, token by token.

Shapes: B batch, T tokens of the prompt, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.nn.tensors import wide

Step = Callable[[Tensor], Tensor]
"""Function that maps new tokens (B, any) to the logits (B, any, V) after each."""


@torch.no_grad()
def write_on(
    step: Step,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Continue `ids`: (B, T) → (B, T + max_new_tokens)."""
    _require_choice(ids, max_new_tokens, temperature, top_k)
    unseen = ids
    for _ in range(max_new_tokens):
        unseen = choose(step(unseen)[:, -1], temperature, top_k, generator)
        ids = torch.cat([ids, unseen], dim=1)
    return ids


def choose(
    logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Ids (B, 1): the likeliest at temperature 0, else draws from softmax(logits/temperature)."""
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    if top_k is not None and top_k < logits_BV.shape[-1]:
        least = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least, float("-inf"))
    return torch.multinomial((wide(logits_BV) / temperature).softmax(dim=-1), 1, generator=generator)


@contextlib.contextmanager
def resting(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode in the block; restore each submodule's mode after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _require_choice(ids: Tensor, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise UsageError(
            f"a prompt of shape {tuple(ids.shape)}", "(B, T) with at least one token", "give a first token"
        )
    if max_new_tokens < 0:
        raise UsageError(f"max_new_tokens={max_new_tokens}", "a whole number from 0", "change it")
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"temperature={temperature}", "a number from 0 (the likeliest token)", "change it")
    if top_k is not None and top_k < 1:
        raise UsageError(f"top_k={top_k}", "a whole number from 1, or None", "change it")
