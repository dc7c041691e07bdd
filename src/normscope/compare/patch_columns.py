"""The columns of a map that reads the patches of an image, in the order of a convolution's kernel.

Shapes: C channels, P × P pixels of a patch, K = C·P·P.
"""

from torch import Tensor

from normscope.anatomy.axes import contracted
from normscope.anatomy.graph import Op, Value, search
from normscope.anatomy.ops import weight_of
from normscope.compare.indices import data

_IMAGE = 4
"""Axes of a batch of images."""


def patch_columns(op: Op) -> Tensor | None:
    """The columns (K,) of a map's weight by channel, then row, then column of the pixel that each one reads.

    None where the map does not read pixels that were only moved, or does not read all patches in one order.
    """
    weight = weight_of(op)
    read = None if weight is None else contracted(op, weight)
    if read is None:
        return None
    value, axis = read
    images = [v for v in search([value], lambda v: v.inputs) if v.op is None and v.live and _is_image(v)]
    pixels = data(images[0]).get(value) if len(images) == 1 else None
    if pixels is None:
        return None
    orders = pixels.movedim(axis, -1).flatten(0, -2).argsort(-1)
    is_one = bool((orders == orders[:1]).all()) and bool((pixels >= 0).all())
    return orders[0] if is_one else None


def _is_image(value: Value) -> bool:
    return len(value.shape) == _IMAGE and value.floating
