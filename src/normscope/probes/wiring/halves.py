"""Half precision where the run has it: updates that round to nothing, and the loss.

    wiring/update-lost     share of a tensor's entries with a gradient that a step at the full rate leaves as
                           they were; at "" over all tensors in half precision
    wiring/loss-error      difference from the cross-entropy in float32 of the same logits, nats, where the
                           vocabulary's softmax or its sum runs in half precision, or half the spacing of
                           the loss's own numbers, if that is more; 0 where it does not
    wiring/loss-gradient-error  relative error of its gradient by the logits

Shapes: V classes.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from normscope.probes.measurement import EXACT, Measurement, not_measured
from normscope.probes.objective import everything_requires_grad
from normscope.probes.parameters import Parameters
from normscope.probes.wiring.forward import forwards, run
from normscope.probes.wiring.targets import find_targets
from normscope.subjects import Subject, call_model
from normscope.subjects.rng import seeded
from normscope.train import Recipe, working_copy
from normscope.train.live import LiveOptimizers
from normscope.train.optim import build_optimizers

HALVES = (torch.float16, torch.bfloat16)
_OF_VOCABULARY = ("_softmax", "_log_softmax", "logsumexp", "exp")
_AGREEING = 0.1
"""Largest relative difference at which the loss counts as the mean cross-entropy itself."""


def has_half_weights(subject: Subject) -> bool:
    """Whether any trained weight is float16 or bfloat16."""
    return any(p.dtype in HALVES and p.requires_grad for p in subject.model.parameters())


def update_rows(subject: Subject, parameters: Parameters, recipe: Recipe) -> Iterator[Measurement]:
    """One step at the full learning rate on a copy, compared with the original; only for half weights."""
    if not has_half_weights(subject) or subject.loss_fn is None:
        return
    kept = unchanged = 0
    with working_copy(subject.model) as twin, seeded(subject.seed), torch.enable_grad():
        if twin is subject.model:
            yield not_measured("wiring/update-lost", "", "the model cannot be copied")
            return
        twin.train()
        subject.loss_fn(call_model(twin, subject.batch), subject.batch).backward()
        for optimizer in _at_full_rate(twin, recipe):
            optimizer.step()
        pairs = list(zip(subject.model.parameters(), twin.parameters(), strict=True))
    for old, new in pairs:
        if old.dtype not in HALVES or new.grad is None:
            continue
        learns = new.grad != 0
        count, same = int(learns.sum()), int(((new.detach() == old.detach()) & learns).sum())
        kept, unchanged = kept + count, unchanged + same
        if count:
            yield Measurement("wiring/update-lost", parameters.names[id(old)], same / count)
    if kept:
        yield Measurement("wiring/update-lost", "", unchanged / kept)


def _at_full_rate(model: nn.Module, recipe: Recipe) -> list[Optimizer]:
    """The run's optimizers on `model`, at the learning rates after a warm-up."""
    optimizers = build_optimizers(model, recipe)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    live = recipe.optimizer if isinstance(recipe.optimizer, LiveOptimizers) else None
    for number, group in enumerate(groups):
        group["lr"] = group["full_lr"] if live is None else live.full_rates[number]
    return optimizers


class _HalfVocabulary(TorchDispatchMode):
    """Records the dtype of half-precision inputs of ops over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, torch.dtype, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _OF_VOCABULARY and args and isinstance(args[0], Tensor) and args[0].dtype in HALVES:
            self.seen.append((args[0].shape[-1] if args[0].ndim else 0, args[0].dtype, name))
        return func(*args, **(kwargs or {}))


def half_spacing(loss: Tensor) -> float:
    """Half the distance of the numbers of the loss's dtype at its value: the error of its last rounding."""
    return (
        torch.finfo(loss.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(float(loss.detach())), 1e-30))) / 2
    )


def loss_rows(subject: Subject, recipe: Recipe) -> Iterator[Measurement]:
    """Precision of the loss, where weights are halves or the run uses autocast."""
    own = subject.run.precision if subject.run is not None else recipe.precision
    if subject.loss_fn is None or (own == "float32" and not has_half_weights(subject)):
        return
    device = next(subject.model.parameters()).device.type
    precision = contextlib.nullcontext() if own == "float32" else torch.autocast(device, getattr(torch, own))
    with forwards(subject), everything_requires_grad(subject.model, subject.batch), _HalfVocabulary() as mode:
        with precision:
            forward = run(subject)
        targets = find_targets(forward)
    if isinstance(targets, str) or forward.loss is None or not bool((targets.ids >= 0).any()):
        reason = targets if isinstance(targets, str) else "no target counts"
        yield not_measured("wiring/loss-error", "", reason, "nats")
        return
    num_classes = targets.logits.shape[-1]
    ops = {
        f"{name.strip('_')} in {str(t).removeprefix('torch.')}"
        for n, t, name in mode.seen
        if n == num_classes
    }
    if not ops:
        yield Measurement("wiring/loss-error", "", 0.0, "nats")
        return
    kept = targets.ids >= 0
    leaf = targets.logits[kept].detach().float().requires_grad_()
    with torch.enable_grad():
        exact = torch.nn.functional.cross_entropy(leaf, targets.ids[kept])
        (gradient,) = torch.autograd.grad(exact, leaf)
    value, reference = float(forward.loss.detach().float()), float(exact.detach())
    how = f"{EXACT}; {', '.join(sorted(ops))}"
    if abs(value - reference) <= _AGREEING * abs(reference):
        error = max(abs(value - reference), half_spacing(forward.loss))
        yield Measurement("wiring/loss-error", "", error, "nats", how)
    else:
        reason = f"the loss is not the mean cross-entropy alone; {', '.join(sorted(ops))}"
        yield not_measured("wiring/loss-error", "", reason, "nats")
    own_gradient = targets.gradient[kept].float()
    scale = (own_gradient * gradient).sum() / gradient.square().sum()
    error = (own_gradient / scale - gradient).norm() / gradient.norm()
    yield Measurement("wiring/loss-gradient-error", "", float(error), how=how)
