"""The runs of the demo: one small Transformer in five conditions, three seeds each."""

from collections.abc import Sequence
from dataclasses import dataclass

from normscope.train import Recipe
from normscope.train.criterion import CRITERION_STEPS


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that all conditions share.

    Attributes:
        depth, width, heads: size of the decoder, one of normscope's own.
        batch_size, seq_len: shape of a batch; its tokens are bytes of the Python standard library's source.
        lr: learning rate of AdamW.
        steps: training steps of each run.
        warmup, clip: warm-up steps and gradient-norm limit of the conditions that use them.
        seeds: seeds of weights and batches, one run each.
        look: steps between two measurements of token diversity.
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
    seeds: Sequence[int] = (0, 1, 2)
    look: int = 10


@dataclass(frozen=True)
class Condition:
    """One condition of the demo.

    Attributes:
        name: short name, for the end of a line.
        change: the difference from the first condition, as a format string of the settings.
        options: options of the model, besides its size.
        warms_up, clips: whether it uses the settings' warm-up and clipping.
    """

    name: str
    change: str
    options: str = "scheme=post,init=xavier"
    warms_up: bool = False
    clips: bool = False

    def words(self, settings: Settings) -> str:
        """The change, with the values of the settings."""
        return self.change.format(settings=settings)

    def model(self, settings: Settings) -> str:
        """The MODEL for `normscope train`."""
        size = f"depth={settings.depth},width={settings.width},heads={settings.heads}"
        return f"nn:decoder,{self.options},{size}"

    def config(self, settings: Settings, seed: int) -> Recipe:
        """The training settings of one run."""
        return Recipe(
            optimizer="adamw",
            lr=settings.lr,
            steps=settings.steps,
            seed=seed,
            warmup=settings.warmup if self.warms_up else 0,
            clip=settings.clip if self.clips else None,
        )

    def command(self, settings: Settings, seed: int) -> str:
        """The command line that trains the same run alone."""
        words = [f"normscope train {self.model(settings)} --lr {settings.lr:g} --steps {settings.steps}"]
        words += [f"--warmup {settings.warmup}"] * self.warms_up + [f"--clip {settings.clip:g}"] * self.clips
        data = f"--batch-size {settings.batch_size} --seq-len {settings.seq_len} --validation 0 --seed {seed}"
        return " ".join([*words, data])


CONDITIONS = (
    Condition("baseline", "Post-LN, Xavier weights, no warm-up"),
    Condition("clipped", "gradients clipped to norm {settings.clip:g}", clips=True),
    Condition("warmed up", "a warm-up of {settings.warmup} steps", warms_up=True),
    Condition("Pre-LN", "the norms inside the branches (Pre-LN)", "scheme=pre,init=xavier"),
    Condition("small init", "weights from N(0, 0.02²)", "scheme=post,init=normal"),
)
"""All conditions; each differs from the first in one thing."""
