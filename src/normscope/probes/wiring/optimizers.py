"""The user's own optimizers beside the model: weights that none holds, and decayed vectors.

    wiring/not-held        1 for a trained parameter that no optimizer holds
    wiring/held-twice      1 for a parameter that several optimizers or groups hold
    wiring/held-share      share of the trained entries that an optimizer holds, at ""
    wiring/foreign         number of tensors in the optimizers that are no parameters of the model and have no
                           gradient, at ""; without those that the loss depends on, where it shows that
    wiring/decay           learning rate × weight decay of a trained vector or scalar: a step's share, where
                           decay is decoupled from the gradient and more than little

Rows only where the user's own optimizers are known.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from normscope.probes.measurement import EXACT, Measurement
from normscope.probes.parameters import Parameters
from normscope.subjects import Subject
from normscope.subjects.subject import LOSS_INPUTS

UNKNOWN = "the loss is not known, or was recorded without them"


DECOUPLED = ("adamw", "lion", "muon", "adafactor", "ademamix", "sophia")
"""Parts of names of optimizers that multiply a weight by 1 − ηλ; Adam adds λw to the gradient."""
LITTLE = 0.01
"""Decay, AdamW's default, up to which it takes little: a hundredth of the length of a step balances it.

After 2000 steps at 3e-3 on bytes (Pre-LN, 3 blocks, width 32) the mean gain is 0.93 without decay, 0.89 with
0.01, and 0.62 with 0.1 (`python -m benchmarks.decayed_gains`).
"""


def _shrinks(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the decay of a group may shrink what no gradient holds firmly; SGD has steps of any size."""
    is_sgd = type(optimizer).__name__.lower() == "sgd"
    decay = float(group.get("weight_decay") or 0.0)
    return _is_decoupled(optimizer, group) and (is_sgd or decay > LITTLE)


def _is_decoupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    name = type(optimizer).__name__.lower()
    if name == "sgd":  # λw joins the gradient, which nothing scales
        return not group.get("momentum")
    return any(part in name for part in DECOUPLED)


def optimizer_rows(subject: Subject, parameters: Parameters) -> Iterator[Measurement]:
    """Rows of the user's optimizers; no forward."""
    optimizers = () if subject.run is None else subject.run.optimizers
    if not optimizers:
        return
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = Counter(id(p) for group in groups for p in group["params"])
    trained = [p for p in parameters.all() if p.requires_grad]
    total = sum(p.numel() for p in trained)
    if total:
        share = sum(p.numel() for p in trained if id(p) in held) / total
        yield Measurement("wiring/held-share", "", share)
    for parameter in trained:
        name = parameters.names[id(parameter)]
        if id(parameter) not in held:
            yield Measurement("wiring/not-held", name, 1.0)
        elif held[id(parameter)] > 1:
            yield Measurement("wiring/held-twice", name, 1.0)
    shrinking = [g for optimizer in optimizers for g in optimizer.param_groups if _shrinks(optimizer, g)]
    for group in shrinking:
        decay = float(group.get("weight_decay") or 0.0)
        rate = max(float(group.get("lr") or 0.0), float(group.get("initial_lr") or 0.0))
        for parameter in group["params"]:
            if id(parameter) in parameters.names and parameter.ndim < 2 and parameter.requires_grad:
                yield Measurement("wiring/decay", parameters.names[id(parameter)], decay * rate)


def foreign_rows(subject: Subject, loss: Tensor | None) -> Iterator[Measurement]:
    """Count tensors of the optimizers that are not the model's and get nothing from `loss`, a graph's end.

    A criterion may have a temperature. A recorded loss keeps the values of such tensors and not their graph.
    """
    optimizers = () if subject.run is None else subject.run.optimizers
    if not optimizers:
        return
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    own = {id(p) for p in subject.model.parameters()}
    foreign = list({id(p): p for p in held if id(p) not in own and p.grad is None}.values())
    is_recorded = isinstance(subject.batch, Mapping) and LOSS_INPUTS in subject.batch
    is_known = loss is not None and loss.requires_grad and not is_recorded
    asked = [p for p in foreign if p.requires_grad]
    if is_known and asked:
        assert loss is not None
        gradients = torch.autograd.grad(loss, asked, retain_graph=True, allow_unused=True)
        reached = {id(p) for p, gradient in zip(asked, gradients, strict=True) if gradient is not None}
        foreign = [p for p in foreign if id(p) not in reached]
    how = EXACT if is_known else f"{EXACT}; {UNKNOWN}"
    yield Measurement("wiring/foreign", "", float(len(foreign)), how=how)
