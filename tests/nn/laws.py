"""Laws that every scheme must obey, as functions of its name.

The tests run them over the whole table, and over the example of CONTRIBUTING.
"""

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from normscope.nn import Block, ModelConfig, Where, build, scheme_named
from normscope.nn.language_model import LanguageModel

SMALL: dict[str, Any] = {"depth": 4, "width": 16, "heads": 2, "vocab": 11, "context": 32}
LABELS = {"labels": torch.randint(11, (2, 7), generator=torch.Generator().manual_seed(1))}


def unsettled(name: str, kind: str = "decoder", **options: Any) -> LanguageModel:
    """A float64 model with no parameter at its initial value: a γ of 1 or a gate of 0 would hide mistakes."""
    model = build(kind, scheme=name, **{**SMALL, **options}).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def ids_of(batch: int = 2, tokens: int = 7) -> Tensor:
    return torch.randint(11, (batch, tokens))


def never_leaks(name: str, tokens: int, at: int, **options: Any) -> None:
    """The id at `at` in the first row changes only its own and later logits of that row."""
    model = unsettled(name, **options)
    ids = ids_of(2, tokens)
    other = ids.clone()
    other[0, at] = (other[0, at] + 1) % 11
    before, after = model(ids).logits, model(other).logits
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[0, :at], after[0, :at])
    assert (before[0, at:] != after[0, at:]).any(dim=-1).all()


def padding_changes_nothing(name: str, kind: str, left: bool, **options: Any) -> None:
    """Padding, on either side, does not change the outputs of real tokens."""
    model = unsettled(name, kind, **options)
    ids, pad = ids_of(1, 5), ids_of(1, 3)
    whole = torch.cat([pad, ids] if left else [ids, pad], dim=1)
    mask = torch.ones(1, 8, dtype=torch.long)
    mask[:, slice(0, 3) if left else slice(5, 8)] = 0
    masked = model(whole, attention_mask=mask).logits[:, slice(3, 8) if left else slice(0, 5)]
    torch.testing.assert_close(masked, model(ids).logits, rtol=1e-10, atol=1e-10)


def survives_its_state_dict(name: str, **options: Any) -> None:
    """A model with other initial weights gives the same after loading the weights; so does a deep copy."""
    model, other = unsettled(name, **options), unsettled(name, **options)
    ids = ids_of()
    logits = model(ids).logits
    assert not torch.equal(other(ids).logits, logits)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids).logits, logits)
    assert torch.equal(copy.deepcopy(model)(ids).logits, logits)


def runs_in_half_precision(name: str, dtype: torch.dtype, **options: Any) -> None:
    """Forward and backward are finite, and close to those in float32."""
    model = build("decoder", scheme=name, **SMALL, **options).train()
    half = copy.deepcopy(model).to(dtype)
    ids, labels = ids_of(), LABELS["labels"]
    wide, output = model(ids, labels), half(ids, labels)
    assert output.logits.dtype == dtype
    output.loss.backward()
    assert all(p.grad.isfinite().all() for p in half.parameters() if p.grad is not None)
    tolerance = 0.1 if dtype == torch.bfloat16 else 0.02
    spread = wide.logits.std().item()
    assert (output.logits.float() - wide.logits).abs().mean().item() < tolerance * spread


def compiles_whole(name: str, backend: str, rtol: float = 1e-9, depth: int = 2, **options: Any) -> None:
    """One graph, the same loss and gradients."""
    torch._dynamo.reset()
    model = unsettled(name, depth=depth, **options).train()
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, backend=backend)
    ids, labels = ids_of(), LABELS["labels"]
    plain, loss = model(ids, labels).loss, compiled(ids, labels).loss
    torch.testing.assert_close(loss, plain, rtol=rtol, atol=0)
    plain.backward()
    loss.backward()
    compared = 0
    for (path, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), path
        if ours.grad is not None:
            torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e3 * rtol, atol=1e3 * rtol)
            compared += 1
    assert compared > 10


class HeldConstants:
    """Context in which `detach` returns what it returned the first time.

    A stop-gradient is a constant, and must stay one when finite differences move the inputs.
    """

    def __init__(self) -> None:
        self.held: list[Tensor] = []
        self.complete = False

    def __enter__(self) -> None:
        self.detach, self.count = Tensor.detach, 0

        def detach(tensor: Tensor) -> Tensor:
            if not self.complete:
                self.held.append(self.detach(tensor).clone())
            self.count += 1
            return self.held[self.count - 1]

        Tensor.detach = detach  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Tensor.detach = self.detach  # type: ignore[method-assign]
        self.complete = True


def gradients_are_right(name: str) -> None:
    """Check a block's gradients, for its input and all its parameters, against finite differences."""
    model, _ = block_map(name, 4)
    scheme = scheme_named(name)
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    parameters = dict(model.named_parameters())

    constants = HeldConstants()

    def through(x: Tensor, *values: Tensor) -> Tensor:
        given = dict(zip(parameters, values, strict=True))
        with constants:
            state = torch.func.functional_call(model, given, (scheme.join.enter(x, lambda x: x),))
        return scheme.join.leave(state, lambda x: x)

    assert torch.autograd.gradcheck(through, (x, *parameters.values()), fast_mode=True)


def block_map(name: str, width: int, block: int = 3) -> tuple[nn.Module, Any]:
    """A single block in float64, and the map of one token's stream through it."""
    config = ModelConfig(scheme=name, depth=4, width=width, heads=1, eps=1e-14)
    torch.manual_seed(0)
    model = Block(config, Where(block, depth=4), causal=True).double().eval()
    scheme = scheme_named(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.3 * torch.randn_like(parameter) / math.sqrt(parameter.shape[-1] if parameter.dim() else 1)
            )

    def through(x_D: Tensor) -> Tensor:
        return scheme.join.leave(model(scheme.join.enter(x_D[None, None], lambda x: x)), lambda x: x)[0, 0]

    return model, through


def rank(name: str, width: int = 12) -> int:
    """Numerical rank of a block's Jacobian at a random token (T = 1), dense."""
    _, through = block_map(name, width)
    jacobian = torch.autograd.functional.jacobian(through, torch.randn(width, dtype=torch.float64))
    return int(torch.linalg.matrix_rank(jacobian, rtol=1e-9))
