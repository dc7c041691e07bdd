"""Ladders of warm-ups: models, wanted learning rates and lengths.

The rates are 1, 2, 4 and 8 times the first one of a case. The last two are the wanted rates, which mostly
fail without a warm-up; they are trained with each of `WARMUPS`. The models are small and read bytes.
"""

from dataclasses import dataclass

from benchmarks.regimes.builders import Model, causal, decoder, plain
from benchmarks.regimes.case import Case
from benchmarks.regimes.feeds import tokens

BYTES = 256
WARMUPS = (9, 18, 36, 72, 150)
TIMES = (1, 2, 4, 8)
WANTED = (4, 8)

_OPT = {
    "num_hidden_layers": 6,
    "hidden_size": 48,
    "word_embed_proj_dim": 48,
    "ffn_dim": 192,
    "num_attention_heads": 3,
    "do_layer_norm_before": False,
}


@dataclass(frozen=True)
class WarmupCase:
    """One model and its learning rates: `first` × `TIMES`."""

    case: Case
    first: float

    @property
    def wanted(self) -> tuple[float, ...]:
        """Learning rates that are trained with warm-ups, too."""
        return tuple(self.first * times for times in WANTED)

    @property
    def runs(self) -> list[tuple[float, int]]:
        """Learning rate and warm-up of each run."""
        bare = [(self.first * times, 0) for times in TIMES]
        return bare + [(rate, warmup) for rate in self.wanted for warmup in WARMUPS]


def _case(part: str, name: str, model: Model, optimizer: str, first: float, seed: int) -> WarmupCase:
    feed = tokens("help" if part == "seen" else "licences", BYTES, model.key)
    return WarmupCase(Case("warmup", name, lambda: model.build(BYTES), feed, optimizer, seed, part), first)


CASES = (
    _case("seen", "post 6 32", decoder("post", 6, 32), "adamw", 7.5e-4, 9000),
    _case("seen", "post 10 32", decoder("post", 10, 32), "adam", 2.5e-4, 9001),
    _case("seen", "deepnorm 10 32", decoder("deepnorm", 10, 32), "adamw", 1.25e-3, 9002),
    _case("seen", "plain post 6 48", plain(6, 48, norm_first=False, tie=False), "adam", 1.25e-3, 9003),
    _case("seen", "post 14 32 torch", decoder("post", 14, 32, init="torch"), "adam", 5e-4, 9004),
    _case("held-out", "post 8 48", decoder("post", 8, 48), "adam", 2.5e-4, 9100),
    _case("held-out", "post 12 32", decoder("post", 12, 32), "adamw", 2e-4, 9101),
    _case("held-out", "deepnorm 14 32 torch", decoder("deepnorm", 14, 32, init="torch"), "adam", 1e-3, 9102),
    _case("held-out", "plain post 9 32", plain(9, 32, norm_first=False, tie=False), "adam", 1e-3, 9103),
    _case("held-out", "opt post 6 48", causal("opt", **_OPT), "adamw", 1.25e-3, 9104),
)
