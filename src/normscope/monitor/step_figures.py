"""Figures of every step: the columns and values of the layout `STEP`."""

import numpy as np
from numpy.typing import NDArray

from normscope.monitor.alarms import NOT_MEASURED
from normscope.monitor.plan import Plan
from normscope.monitor.row import Layout
from normscope.monitor.streams import Streams
from normscope.monitor.taken import Taken

SCALARS = ("loss", "gradient/norm", "lr", "seconds", "tokens", "skipped", "loss-scale")


def layout_of(plan: Plan, *, is_rescued: bool) -> Layout:
    """(quantity, site) of each value of a step; `is_rescued` is whether the run has a rescue."""
    return (
        *((name, "") for name in SCALARS),
        *(("stream/rms", each.site) for each, _ in plan.of("stream")),
        *(("gradient/block", block) for block in plan.groups.blocks),
        *(("gradient/kind", kind) for kind in plan.groups.kinds),
        *([("rescued", "")] if is_rescued else []),
    )


def values_of(taken: Taken, loss: float, plan: Plan, streams: Streams) -> NDArray[np.float64]:
    """Values of a step whose numbers the host has, in the order of `layout_of`."""
    groups = plan.groups
    if taken.gradients is None or taken.is_skipped:  # no optimizer stepped
        gradients = np.full(1 + len(groups.blocks) + len(groups.kinds), NOT_MEASURED)
    else:
        sums = taken.gradients.by_parameter()
        gradients = np.sqrt([groups.shared(sums).sum(), *groups.by_block(sums), *groups.by_kind(sums)])
    scale = NOT_MEASURED if taken.scale is None else float(taken.scale)
    scalars = [loss, gradients[0], taken.rate, taken.seconds, taken.tokens, taken.is_skipped, scale]
    rms = streams.rms_of(taken.parts)[streams.columns]
    rescued = [] if taken.rescued is None else [taken.rescued]
    return np.array([*scalars, *rms, *gradients[1:], *rescued])
