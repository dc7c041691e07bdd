"""Trained weights that get no gradient, and gradients that clipping takes to nothing.

    wiring/no-gradient    1 for a trained parameter that gets none: no path from the loss, or exactly zero
    wiring/needed         1 where the loss changes with such a parameter, 0 where not: the parameter is unused
    wiring/num-starved    number of the parameters without gradient, at ""
    wiring/num-freed      number of those that get one when tensors of zeros leave zero, at ""
    wiring/needed-share   share of the trained entries that get none and are needed, at ""
    wiring/clip-factor    clip / norm of all gradients, at "", where the user clips
    wiring/norm-share     share of the squared gradient norm of the tensor that has most of it
    wiring/clipped-rest   RMS gradient of the other weights after clipping, over Adam's ε; with an optimizer
                          without ε, their step over half the spacing of their values

A zero start is no fault: tensors of zeros that get a gradient are moved off zero, as by the first step, and
the backward is repeated (ReZero, LoRA, zero output matrices). What is left is tried in train mode on further
batches (experts, layers that are dropped).
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, named_modules
from normscope.probes.backward import Backward, differentiated
from normscope.probes.measurement import EXACT, Measurement, not_measured
from normscope.probes.objective import objective
from normscope.probes.parameters import Parameters
from normscope.probes.rows import NOT_FINITE
from normscope.probes.sums import energy, is_zero
from normscope.subjects import Subject
from normscope.subjects.rng import seeded

ROUNDS = 3
"""Steps that a zero start may need until every weight gets a gradient."""
MORE_BATCHES = 3
MOST_GROUPS = 12
"""Groups of starved parameters whose effect on the loss is tested, a forward each; the others share one."""
_NOISE = 0.02
_SAMPLE = 4096


def starved_rows(
    subject: Subject, anatomy: Anatomy, parameters: Parameters, backward: Backward, loss: Tensor
) -> Iterator[Measurement]:
    """Rows of the parameters without gradient; call where gradients flow, inside `measuring`.

    `backward` and `loss` are those of the fixed batch.
    """
    if backward.failure is not None:
        yield not_measured("wiring/num-starved", "", backward.failure)
        return
    if not bool(loss.isfinite()):
        yield not_measured("wiring/num-starved", "", NOT_FINITE)
        return
    if parameters.are_frozen or subject.loss_fn is None:
        reason = "every parameter is frozen" if parameters.are_frozen else "no loss is known"
        yield not_measured("wiring/num-starved", "", reason)
        return
    starved = [p for p in parameters.trained() if _is_nothing(backward.of(p))]
    called: set[str] = set()
    freed = 0
    if starved:
        with seeded(subject.seed):
            before, starved = len(starved), _after_zero_start(subject, parameters, starved, backward)
            freed = before - len(starved)
            starved = _on_more_batches(subject, starved, called)
    starved = _reported(parameters, starved)
    yield Measurement("wiring/num-starved", "", float(len(starved)))
    yield Measurement("wiring/num-freed", "", float(freed))
    if starved:
        yield from _rows(subject, anatomy, parameters, starved, called)


def _is_nothing(gradient: Tensor | None) -> bool:
    if gradient is None:
        return True
    flat = gradient.detach().reshape(-1)
    return is_zero(flat[:: max(1, flat.numel() // _SAMPLE)]) and is_zero(flat)


def _after_zero_start(
    subject: Subject, parameters: Parameters, starved: list[nn.Parameter], backward: Backward
) -> list[nn.Parameter]:
    """The parameters that still get nothing when tensors of zeros have left zero."""
    zeros = [p for p in parameters.trained() if is_zero(p)]
    moving = [p for p in zeros if not _is_nothing(backward.of(p))]
    moved: list[nn.Parameter] = []
    try:
        for _ in range(ROUNDS):
            if not moving or not starved:
                break
            for parameter in moving:
                parameter.data.normal_(std=_NOISE)
            moved += moving
            rest = [p for p in zeros if all(p is not other for other in moved)]
            weights = list({id(p): p for p in [*starved, *rest]}.values())
            found = differentiated(objective(subject), weights)
            if isinstance(found, str):
                break
            alive = {id(p) for p, g in zip(weights, found, strict=True) if not _is_nothing(g)}
            starved = [p for p in starved if id(p) not in alive]
            moving = [p for p in rest if id(p) in alive]
        return starved
    finally:
        for parameter in moved:
            parameter.data.zero_()


def _on_more_batches(subject: Subject, starved: list[nn.Parameter], called: set[str]) -> list[nn.Parameter]:
    """The parameters that get nothing in train mode on further batches either; enters called modules."""
    modes = [(module, module.training) for module in subject.model.modules()]
    handles = [
        module.register_forward_hook(lambda *_, name=name: called.add(name))
        for name, module in named_modules(subject.model)
    ]
    try:
        subject.model.train()
        for batch in itertools.islice(subject.batches(), MORE_BATCHES):
            if not starved:
                break
            found = differentiated(objective(subject, batch), list(starved))
            if not isinstance(found, str):
                starved = [p for p, g in zip(starved, found, strict=True) if _is_nothing(g)]
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes:
            module.training = mode
    return starved


def _reported(parameters: Parameters, starved: list[nn.Parameter]) -> list[nn.Parameter]:
    """Starved matrices, and vectors of modules in which every parameter starves.

    A lone vector may have a gradient of exactly zero by mathematics: a key's bias shifts all logits alike.
    """
    ids = {id(p) for p in starved}
    owners: dict[str, bool] = {}
    for name, parameter in parameters.by_name.items():
        owner = name.rpartition(".")[0]
        if parameter.requires_grad:
            owners[owner] = owners.get(owner, True) and id(parameter) in ids
    return [p for p in starved if p.ndim >= 2 or owners.get(parameters.names[id(p)].rpartition(".")[0])]


def _rows(
    subject: Subject, anatomy: Anatomy, parameters: Parameters, starved: list[nn.Parameter], called: set[str]
) -> Iterator[Measurement]:
    blocks = sorted({block.path for block in anatomy.blocks if block.path}, key=len, reverse=True)
    groups: dict[str, list[nn.Parameter]] = {}
    for parameter in starved:
        name = parameters.names[id(parameter)]
        owner = name.rpartition(".")[0]
        groups.setdefault(next((b for b in blocks if name.startswith(f"{b}.")), owner), []).append(parameter)
    with torch.no_grad(), seeded(subject.seed):
        loss = float(objective(subject))
    starving = 0
    rest = [p for members in list(groups.values())[MOST_GROUPS:] for p in members]
    is_rest_needed = bool(rest) and _changes_loss(subject, rest, loss)
    for number, members in enumerate(groups.values()):
        needed = is_rest_needed if number >= MOST_GROUPS else _changes_loss(subject, members, loss)
        starving += needed * sum(p.numel() for p in members)
        for parameter in members:
            name = parameters.names[id(parameter)]
            owner = name.rpartition(".")[0]
            is_called = owner in called or any(other.startswith(f"{owner}.") for other in called)
            kind = "no path from the loss leads to it, or its gradient is exactly zero"
            kind = kind if is_called else "its module is never called"
            zero = "; it is zero" if is_zero(parameter) else ""
            yield Measurement("wiring/no-gradient", name, 1.0, how=f"{EXACT}; {kind}{zero}")
            yield Measurement("wiring/needed", name, float(needed))
    trained = sum(p.numel() for p in parameters.trained())
    yield Measurement("wiring/needed-share", "", starving / trained)


@torch.no_grad()
def _changes_loss(subject: Subject, parameters: list[nn.Parameter], loss: float) -> bool:
    """Whether the loss changes when the parameters are replaced by random ones.

    The padding row of an embedding, which gets no gradient by design, stays.
    """
    kept = [p.detach().clone() for p in parameters]
    tables = [m for m in subject.model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None]
    padded = {id(table.weight): table.padding_idx for table in tables}
    try:
        for parameter, old in zip(parameters, kept, strict=True):
            scale = float(old.float().square().mean().sqrt()) or _NOISE
            parameter.data.add_(torch.randn_like(old), alpha=scale)
            if id(parameter) in padded:
                parameter.data[padded[id(parameter)]] = old[padded[id(parameter)]]
        with seeded(subject.seed):
            return float(objective(subject)) != loss
    finally:
        for parameter, old in zip(parameters, kept, strict=True):
            parameter.data.copy_(old)


def clip_rows(subject: Subject, parameters: Parameters, backward: Backward) -> Iterator[Measurement]:
    """Rows of clipping: the tensor with most of the norm, and the others; only where the user clips."""
    if subject.run is None or not subject.run.clip or not subject.run.optimizers:
        return
    energies = {id(p): energy(g) for p in parameters.trained() if (g := backward.of(p)) is not None}
    total = sum(energies.values())
    if len(energies) < 2 or not 0 < total < float("inf"):
        yield not_measured("wiring/clip-factor", "", "no finite gradient")
        return
    factor = min(1.0, subject.run.clip / total**0.5)
    largest = max(energies, key=lambda key: energies[key])
    rest = [p for p in parameters.trained() if id(p) in energies and id(p) != largest]
    yield Measurement("wiring/clip-factor", "", factor)
    yield Measurement("wiring/norm-share", parameters.names[largest], energies[largest] / total)
    rms = (sum(energies[id(p)] for p in rest) / sum(p.numel() for p in rest)) ** 0.5 * factor
    group = subject.run.optimizers[0].param_groups[0]
    if "eps" in group:
        how = f"{EXACT}; times Adam's ε, {float(group['eps']):g}"
        yield Measurement("wiring/clipped-rest", "", rms / max(float(group["eps"]), 1e-300), how=how)
        return
    values = (sum(energy(p) for p in rest) / sum(p.numel() for p in rest)) ** 0.5
    spacing = torch.finfo(rest[0].dtype).eps / 2 * values
    how = f"{EXACT}; times the smallest step that moves their values"
    if spacing:
        yield Measurement("wiring/clipped-rest", "", float(group["lr"]) * rms / spacing, how=how)
