"""`Every`: how often a checkpoint is written."""

import math
from dataclasses import dataclass

from normscope.errors import UsageError


@dataclass(frozen=True)
class Every:
    """Interval between checkpoints, in steps or in seconds."""

    steps: int | None = None
    seconds: float | None = None

    @staticmethod
    def parse(text: str) -> "Every":
        """Read an interval: "100" is in steps, "60s" in seconds.

        Raises:
            UsageError: neither of them.
        """
        number = text.removesuffix("s")
        try:
            if number != text and 0 <= float(number) < math.inf:
                return Every(seconds=float(number))
            if number == text and int(number) > 0:
                return Every(steps=int(number))
        except ValueError:
            pass  # said below
        raise UsageError(f'checkpoint every "{text}"', "steps or seconds", "write 100 or 60s")
