"""Keys of the steps of a walk: where a tensor lies, and its name there."""

At = tuple[int, int, int]
"""Numbers of stack, block and branch; `OUTSIDE` where a tensor lies in none."""
Key = tuple[int, int, int, str]
"""A place and the name of a tensor there, see `Step`."""
OUTSIDE = -1
OUTPUT = "output of the model"
WEIGHT = "weight "
"""Beginning of the names of steps that hold the gradient of the loss in a parameter."""


def way_in(stack: int) -> At:
    """The place before a stack: that of the first one is the whole model's."""
    return (OUTSIDE, OUTSIDE, OUTSIDE) if stack == 0 else (stack, OUTSIDE, 0)
