"""The grid: small settings that are known to fail late, at learning rates near the largest that train.

Fixed before any of its runs was trained. Why these: a rate that still rises after the trial ("rising", a
warm-up of 1000 steps), constant rates near the edge ("constant"), batches learnt by heart, whose gradients
shrink until Adam's mean square is too small ("by heart"; Thilak et al. 2022, arXiv:2206.04817), weight decay
that keeps weights small and so their steps large ("decay"), clipping ("clipped"), streams without norms, and
Post-LN. Rates come from 36 pilot runs of 700 to 1000 steps on a third text ("help", seeds from 900 on), which
are not part of the grid. The held-out ladders have another text and other seeds. Two of their four schemes
are others; Pre-LN and Post-LN, which both parts have, have another depth and another β2 there.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.regimes import data
from normscope.nn import Decoder, build

STEPS = 2000
WIDTH, HEADS, BATCH, TOKENS, VOCABULARY = 24, 2, 2, 32, 128


@dataclass(frozen=True)
class Setting:
    """One run of a ladder.

    Attributes:
        kind: what may make it fail.
        lr, warmup, decay, clip: of `Recipe`.
        seed: of its weights.
        repeat: number of different batches, which are repeated; 0 for all of the text.
    """

    kind: str
    lr: float
    seed: int = 0
    warmup: int = 0
    decay: float | None = None
    clip: float | None = None
    repeat: int = 0


REFERENCE = Setting("reference", 1e-3)
"""The run that shows how hard each batch is; it is not scored."""


@dataclass(frozen=True)
class Ladder:
    """Runs that are trained as a stack, with weights of their own.

    Attributes:
        seed: of the batches, which are the same for all runs but those that repeat some.
    """

    name: str
    part: str
    text: str
    scheme: str
    depth: int
    beta2: float
    seed: int
    settings: tuple[Setting, ...]

    def ids(self) -> np.ndarray:
        """The text's bytes; those that are not ASCII count as one id."""
        found: np.ndarray = np.minimum(data.ids_of(self.text, data.BYTES), VOCABULARY - 1)
        return found

    def entropy(self) -> float:
        """Unigram entropy of the text in nats."""
        return data.entropy_of(self.ids())

    def model(self, seed: int) -> Decoder:
        """A model with the weights of a seed."""
        torch.manual_seed(seed)
        built = build(
            "decoder",
            scheme=self.scheme,
            depth=self.depth,
            width=WIDTH,
            heads=HEADS,
            vocab=VOCABULARY,
            context=TOKENS,
            bias=False,
            activation="relu",
        )
        assert isinstance(built, Decoder)
        return built.train()

    def batches(self, setting: Setting) -> Iterator[Tensor]:
        """Batches of a run."""
        windows = data.windows(self.ids(), BATCH, TOKENS, setting.seed if setting.repeat else self.seed)
        if not setting.repeat:
            return windows
        return itertools.cycle(list(itertools.islice(windows, setting.repeat)))


def constant(*rates: float) -> list[Setting]:
    return [Setting("constant", rate) for rate in rates]


def rising(*rates: float) -> list[Setting]:
    return [Setting("rising", rate, warmup=1000) for rate in rates]


def by_heart(*rates: float) -> list[Setting]:
    return [Setting("by heart", rate, repeat=1) for rate in rates]


def decayed(*rates: float) -> list[Setting]:
    return [Setting("decay", rate, decay=1.0) for rate in rates]


def clipped(*rates: float) -> list[Setting]:
    return [Setting("clipped", rate, warmup=1000, clip=1.0) for rate in rates]


Row = tuple[str, int, float, Sequence[Setting]]
"""Scheme, depth, β2 and runs of a ladder."""

_SET_ON: tuple[Row, ...] = (
    ("pre", 2, 0.95, [*rising(0.05, 0.1, 0.2), *constant(0.03, 0.1), *by_heart(4e-3, 1e-2), *clipped(0.1)]),
    ("post", 3, 0.999, [*rising(0.02, 0.05, 0.1), *constant(5e-3, 1e-2, 2e-2), *decayed(5e-3, 1e-2)]),
    ("residual-no-norm", 2, 0.999, [*rising(5e-3, 1e-2, 2e-2, 4e-2, 8e-2), *constant(5e-3, 1e-2, 2e-2)]),
    (
        "pre-no-final",
        2,
        0.98,
        [*rising(0.05, 0.1, 0.2), *constant(0.03, 0.08), *decayed(0.03), *by_heart(5e-3, 2e-2)],
    ),
)
_HELD_OUT: tuple[Row, ...] = (
    (
        "pre",
        3,
        0.999,
        [*rising(0.04, 0.08, 0.15), *constant(0.02, 0.06), *by_heart(5e-3, 2e-2), *decayed(0.02)],
    ),
    (
        "post",
        2,
        0.95,
        [*rising(0.03, 0.08, 0.15), *constant(7e-3, 1.5e-2, 3e-2), *by_heart(5e-3), *clipped(0.08)],
    ),
    ("rezero", 2, 0.98, [*rising(0.01, 0.03, 0.08, 0.2), *constant(1e-2, 3e-2, 6e-2), *by_heart(1e-2)]),
    (
        "res-post",
        2,
        0.999,
        [*rising(0.04, 0.08, 0.15), *constant(0.02, 0.06, 0.12), *decayed(0.02), *clipped(0.1)],
    ),
)


def _ladders(part: str, text: str, seed: int, rows: Sequence[Row]) -> Iterator[Ladder]:
    """Ladders with seeds of their own, 20 apart, and a seed for each run."""
    for number, (scheme, depth, beta2, settings) in enumerate(rows):
        first = seed + 20 * number
        seeded = tuple(
            Setting(**vars(setting) | {"seed": first + 1 + k}) for k, setting in enumerate(settings)
        )
        name = f"{scheme}, {depth} blocks, β2 {beta2:g}, {text}"
        yield Ladder(name, part, text, scheme, depth, beta2, first, seeded)


LADDERS = (
    *_ladders("set-on", "library", 5000, _SET_ON),
    *_ladders("held-out", "licences", 7000, _HELD_OUT),
)
