"""Norms whose result the residual add before them computes, in one operation with the add."""

from typing import Any

from torch import Tensor


class ReadsAhead:
    """Mixin of a norm that returns its result for a tensor if it was computed before."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The norm of x."""
        known = self.__dict__.pop("_ahead", None)
        if known is not None and known[0] is x:
            return known[1]
        return super().forward(x, *args, **kwargs)  # type: ignore[misc]

    def expect(self, x: Tensor, normed: Tensor) -> None:
        """Keep the norm of x for the next call."""
        self.__dict__["_ahead"] = (x, normed)

    def forget(self) -> None:
        """Drop what is kept."""
        self.__dict__.pop("_ahead", None)
