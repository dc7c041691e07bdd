"""The held graph of a float64 copy: the second opinion on a derivative that looks wrong.

There the finite differences take steps so small that a saturated softmax does not bend within them, and a
rounding under a straight-through gradient does not move at all.
"""

import copy

import torch
from torch import nn

from normscope.anatomy import Anatomy, measuring
from normscope.probes.jacobian.derivative import TINY
from normscope.probes.jacobian.held_graph import HeldGraph, hold
from normscope.probes.jacobian.one_sequence import Feed, cast, fed_alike


def held_in_double(model: nn.Module, anatomy: Anatomy, feed: Feed) -> HeldGraph | None:
    """The graph of the same sequence in a float64 copy, shifted by `TINY` steps.

    None where the model cannot be copied, does not run in float64, or has other ops there. Costs two forwards
    and a reading besides those of `hold`.
    """
    try:
        twin = copy.deepcopy(model).double()
        with measuring(twin):
            fed = fed_alike(twin, anatomy, cast(feed.batch, torch.float64), feed.note)
            return hold(twin, anatomy, fed, TINY)
    except Exception:  # a forward may raise anything in a precision that it was not made for
        return None
