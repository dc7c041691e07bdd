"""Ladders of warm-ups: models, wanted learning rates and lengths.

A case has one wanted learning rate, which mostly fails without a warm-up. It is trained with each of
`WARMUPS`, and without one at the `SHARES` of it. The models are small and read bytes.
"""

from dataclasses import dataclass

from benchmarks.regimes.builders import Model, causal, decoder, opt, plain
from benchmarks.regimes.case import Case
from benchmarks.regimes.feeds import tokens

BYTES = 256
WARMUPS = (9, 18, 36, 72, 150)
SHARES = (1, 0.5, 0.25)


@dataclass(frozen=True)
class WarmupCase:
    """One model and its wanted learning rate."""

    case: Case
    wanted: float

    @property
    def runs(self) -> list[tuple[float, int]]:
        """Learning rate and warm-up of each run."""
        bare = [(self.wanted * share, 0) for share in SHARES]
        return bare + [(self.wanted, warmup) for warmup in WARMUPS]


def _case(part: str, name: str, model: Model, optimizer: str, wanted: float, seed: int) -> WarmupCase:
    feed = tokens("help" if part == "seen" else "licences", BYTES, model.key)
    return WarmupCase(Case("warmup", name, lambda: model.build(BYTES), feed, optimizer, seed, part), wanted)


CASES = (
    _case("seen", "post 4 32", decoder("post", 4, 32), "adamw", 1.2e-2, 9005),
    _case("held-out", "deepnorm 4 32", decoder("deepnorm", 4, 32), "adamw", 3e-2, 9105),
    _case("held-out", "post 5 32", decoder("post", 5, 32), "adam", 8e-3, 9106),
    _case("seen", "deepnorm 5 32", decoder("deepnorm", 5, 32), "adam", 2e-2, 9006),
    _case("seen", "post 6 32", decoder("post", 6, 32), "adamw", 3e-3, 9000),
    _case("held-out", "post 8 48", decoder("post", 8, 48), "adam", 1.5e-3, 9100),
    _case("seen", "post 10 32", decoder("post", 10, 32), "adam", 1e-3, 9001),
    _case("held-out", "plain post 9 32", plain(9, 32, norm_first=False, tie=False), "adam", 5e-3, 9101),
    _case("seen", "deepnorm 10 32", decoder("deepnorm", 10, 32), "adamw", 8e-3, 9002),
    _case("held-out", "opt post 6 48", causal("opt", **opt(6, 48)), "adamw", 5e-3, 9102),
    _case("seen", "plain post 6 48", plain(6, 48, norm_first=False, tie=False), "adam", 8e-3, 9003),
    _case("held-out", "post 12 32", decoder("post", 12, 32), "adamw", 1e-3, 9103),
    _case("seen", "post 12 32 torch", decoder("post", 12, 32, init="torch"), "adam", 2e-3, 9004),
    _case("held-out", "deepnorm 12 32 torch", decoder("deepnorm", 12, 32, init="torch"), "adam", 5e-3, 9104),
)
