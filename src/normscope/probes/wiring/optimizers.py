"""The user's own optimizers beside the model: weights that none holds, and decayed vectors.

    wiring/not-held        1 for a trained parameter that no optimizer holds
    wiring/held-twice      1 for a parameter that several optimizers or groups hold
    wiring/held-share      share of the trained entries that an optimizer holds, at ""
    wiring/foreign         number of tensors in the optimizers that are no parameters of the model, at ""
    wiring/decay           learning rate × weight decay of a trained vector or scalar: a step's share

Rows only where the user's own optimizers are known.
"""

from collections import Counter
from collections.abc import Iterator

from normscope.probes.measurement import Measurement
from normscope.probes.parameters import Parameters
from normscope.subjects import Subject


def optimizer_rows(subject: Subject, parameters: Parameters) -> Iterator[Measurement]:
    """Rows of the user's optimizers; no forward."""
    optimizers = () if subject.run is None else subject.run.optimizers
    if not optimizers:
        return
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = Counter(id(p) for group in groups for p in group["params"])
    trained = [p for p in parameters.all() if p.requires_grad]
    total = sum(p.numel() for p in trained)
    own = {id(p) for p in subject.model.parameters()}
    if total:
        share = sum(p.numel() for p in trained if id(p) in held) / total
        yield Measurement("wiring/held-share", "", share)
    yield Measurement("wiring/foreign", "", float(sum(1 for key in held if key not in own)))
    for parameter in trained:
        name = parameters.names[id(parameter)]
        if id(parameter) not in held:
            yield Measurement("wiring/not-held", name, 1.0)
        elif held[id(parameter)] > 1:
            yield Measurement("wiring/held-twice", name, 1.0)
    for group in groups:
        decay = float(group.get("weight_decay") or 0.0)
        rate = max(float(group.get("lr") or 0.0), float(group.get("initial_lr") or 0.0))
        for parameter in group["params"]:
            if id(parameter) in parameters.names and parameter.ndim < 2 and parameter.requires_grad:
                yield Measurement("wiring/decay", parameters.names[id(parameter)], decay * rate)
