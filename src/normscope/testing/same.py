"""`assert_same_model`: a comparison that passes or raises, with the differences as the message.

It imports nothing heavy before it is called: the pytest plugin loads this package in every test run.
"""

import warnings
from typing import TYPE_CHECKING, Any

from normscope.errors import UsageError

if TYPE_CHECKING:
    from normscope.compare import Diff


def assert_same_model(
    a: Any, b: Any, *, rtol: float | None = None, batch: Any = None, parts: Any = None, **options: Any
) -> "Diff":
    """Compare two models, and raise AssertionError with the comparison if they differ.

    A comparison of the functions that could not be made (no weight can be mapped, the models take different
    inputs) fails too, unless `parts` leaves it out. Python warnings of the models are silenced.

    Args:
        a, b: modules, functions that build them, or MODELs as on the command line: see `normscope.diff`.
        rtol: largest relative difference of two tensors that counts as equal; None measures the rounding.
        batch: batch of both models, for modules; None makes one.
        parts: parts to compare, such as "structure,function"; None compares all that the two allow.
        options: further options of `normscope.diff`: `map`, `seed`, `seq_len`, ….

    Returns:
        The comparison of models that are the same.

    Raises:
        AssertionError: the models differ, or their functions could not be compared.
        UsageError: a model or an option cannot be used.
    """
    __tracebackhide__ = True
    import normscope

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = normscope.diff(a, b, rtol=rtol, batch=batch, parts=parts, **options)
    except UsageError as error:  # one message; the frames inside normscope help nobody
        raise error.with_traceback(None) from error.__cause__
    missing = [each for each in found.parts if each.part == "function" and each.how == "not"]
    if found.differences or missing or all(each.how == "not" for each in found.parts):
        raise AssertionError(found.to_text())
    return found
