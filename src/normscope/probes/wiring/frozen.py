"""Frozen branches.

wiring/frozen    share of the entries that are frozen: of the model, at "", and of each branch's matrices
wiring/adapted   1 for a branch with frozen matrices in whose modules other parameters train
"""

from collections.abc import Iterator

from normscope.anatomy import Anatomy
from normscope.probes.measurement import Measurement, not_measured
from normscope.probes.parameters import Parameters


def frozen_rows(anatomy: Anatomy, parameters: Parameters) -> Iterator[Measurement]:
    """Frozen shares of the model and of each branch; no forward.

    A branch's matrices are those of its modules without what was added to them (LoRA keeps the given weight
    under `base_layer`).
    """
    if parameters.are_frozen:
        yield not_measured("wiring/frozen", "", "every parameter is frozen")
        return
    everything = parameters.all()
    frozen = sum(p.numel() for p in everything if not p.requires_grad)
    yield Measurement("wiring/frozen", "", frozen / max(1, sum(p.numel() for p in everything)))
    for branch in anatomy.branches:
        weights = {p.parameter: parameters.by_name.get(p.parameter) for p in branch.projections}
        found = {name: weight for name, weight in weights.items() if weight is not None}
        if not found:
            continue
        still = sum(w.numel() for w in found.values() if not w.requires_grad)
        yield Measurement("wiring/frozen", branch.site, still / sum(w.numel() for w in found.values()))
        prefix = f"{branch.path}."
        if still and any(n.startswith(prefix) and p.requires_grad for n, p in parameters.by_name.items()):
            yield Measurement("wiring/adapted", branch.site, 1.0)
