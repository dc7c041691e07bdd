"""What the demo trains: one small Transformer in five conditions, three seeds each."""

import dataclasses
import json
from dataclasses import dataclass

from normscope.train import TrialConfig
from normscope.train.criterion import CRITERION_STEPS


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all conditions have in common.

    Attributes:
        depth, width, heads: of a decoder of ours.
        batch_size, seq_len: of bytes of the Python standard library's source.
        lr: of AdamW.
        steps: of each run.
        warmup, clip: of the conditions that have them.
        seeds: of weights and batches.
        look: steps between two looks at the tokens.
    """

    depth: int = 8
    width: int = 32
    heads: int = 2
    batch_size: int = 16
    seq_len: int = 32
    lr: float = 3e-3
    steps: int = CRITERION_STEPS
    warmup: int = 200
    clip: float = 1.0
    seeds: tuple[int, ...] = (0, 1, 2)
    look: int = 10

    @classmethod
    def of_json(cls, words: str) -> "Settings":
        """The settings of `to_json`."""
        values = json.loads(words)
        return cls(**values | {"seeds": tuple(values["seeds"])})

    def to_json(self) -> str:
        """On one line, for a worker."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Condition:
    """One way of training it.

    Attributes:
        name: short, for the end of a line.
        change: what is other than in the first condition, in words that may name the settings.
        options: of the model, beside its size.
        warms_up, clips: whether with the warm-up, with the clipping of the settings.
    """

    name: str
    change: str
    options: str = "scheme=post,init=xavier"
    warms_up: bool = False
    clips: bool = False

    def words(self, settings: Settings) -> str:
        """What is changed, with the figures."""
        return self.change.format(settings=settings)

    def model(self, settings: Settings) -> str:
        """MODEL of `normscope train`."""
        size = f"depth={settings.depth},width={settings.width},heads={settings.heads}"
        return f"nn:decoder,{self.options},{size}"

    def config(self, settings: Settings, seed: int) -> TrialConfig:
        """How it is trained."""
        return TrialConfig(
            optimizer="adamw",
            lr=settings.lr,
            steps=settings.steps,
            seed=seed,
            warmup=settings.warmup if self.warms_up else 0,
            clip=settings.clip if self.clips else None,
        )

    def command(self, settings: Settings, seed: int) -> str:
        """What to type for the same run alone."""
        words = [f"normscope train {self.model(settings)} --lr {settings.lr:g} --steps {settings.steps}"]
        words += [f"--warmup {settings.warmup}"] * self.warms_up + [f"--clip {settings.clip:g}"] * self.clips
        data = f"--batch-size {settings.batch_size} --seq-len {settings.seq_len} --validation 0 --seed {seed}"
        return " ".join([*words, data])


CONDITIONS = (
    Condition("as it is", "Post-LN, Xavier weights, no warm-up"),
    Condition("clipped", "gradients clipped to norm {settings.clip:g}", clips=True),
    Condition("warmed up", "a warm-up of {settings.warmup} steps", warms_up=True),
    Condition("Pre-LN", "the norms inside the branches (Pre-LN)", "scheme=pre,init=xavier"),
    Condition("small init", "weights from N(0, 0.02²)", "scheme=post,init=normal"),
)
"""The first is what the others are a change of."""
