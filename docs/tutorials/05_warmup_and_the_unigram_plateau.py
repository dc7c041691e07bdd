# # Warm-up and the unigram plateau
#
# A deep Post-LN run that fails shows no NaN and no rising loss. Its loss falls like any other, stops at the
# entropy of the byte frequencies, and stays there. This page reproduces the failure and tries four usual
# remedies: three rescue the run, gradient clipping does not.

import math

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

from normscope.maps import Cell, train_group
from normscope.train import Recipe, RunConfig, last_loss, trains

torch.set_num_threads(1)
steps = 300

# ## The value of the plateau
#
# The best that a model can do without seeing any other byte is to predict each byte by its frequency. Its
# loss is then the entropy of these frequencies, the *unigram entropy*. If all tokens look alike to the
# head, no lower loss is possible.

subject = RunConfig(model="nn:decoder,depth=1,width=8", seq_len=64, validation=0.0).subject()
batches = subject.batches()
counts = torch.zeros(256, dtype=torch.float64)
for _ in range(1000):
    counts += next(batches)["ids"].flatten().bincount(minlength=256)
frequencies = counts / counts.sum()
estimate = float(-(frequencies * frequencies.clamp_min(1e-300).log()).sum())
entropy = subject.unigram_entropy
print(f"entropy of the bytes: {entropy:.2f} nats; from 1000 batches: {estimate:.2f}")
assert abs(entropy - estimate) < 0.1

# ## Five runs
#
# Six blocks, width 32, AdamW at a learning rate of 3e-3, 300 steps on the source text of Python's own
# library, one seed. The baseline ("as it comes") is Post-LN with Xavier weights at the full learning rate
# from the first step. The others change one thing each.

POST = "nn:decoder,scheme=post,init=xavier,depth=6,width=32,heads=2"
SMALL = "nn:decoder,scheme=post,init=normal,depth=6,width=32,heads=2"


def config(model=POST, **options):
    trial = Recipe(lr=3e-3, steps=steps, **options)
    return RunConfig(model=model, seq_len=64, validation=0.0, trial=trial)


RUNS = {
    "as it comes": config(),
    "200 steps of warm-up": config(warmup=200),
    "weights N(0, 0.02²)": config(SMALL),
    "output bias = log frequencies": config(POST + ",output_bias=unigram"),
    "gradients clipped at 1": config(clip=1.0),
}

# Runs that differ only in learning rate, warm-up and seed are trained together, as one stack.


def train_all(configs):
    """The losses of each."""
    cells = [Cell(each) for each in configs]
    losses = {}
    for shape in dict.fromkeys(cell.shape for cell in cells):
        group = [cell for cell in cells if cell.shape == shape]
        for cell, result in zip(group, train_group(group, early_stop=False), strict=True):
            losses[cell.key] = list(result.losses)
    return [losses[cell.key] for cell in cells]


losses = dict(zip(RUNS, train_all(RUNS.values()), strict=True))
limit = entropy - 0.05  # nearer to the criterion, the machine's rounding decides
for name, run in losses.items():
    print(f"{name:30} {last_loss(run):.2f}  {'trains' if trains(run, limit) else 'plateau'}")
saved = {name for name, run in losses.items() if trains(run, limit)}
assert saved == {"200 steps of warm-up", "weights N(0, 0.02²)", "output bias = log frequencies"}

# ## A failed run
#
# All losses are finite, and no run ends far above the entropy. The failed runs end at it; how close
# differs with the machine's rounding.

plateaus = {name: run for name, run in losses.items() if name not in saved}
assert all(math.isfinite(loss) for run in losses.values() for loss in run)
for name, run in plateaus.items():
    assert abs(last_loss(run) - entropy) < 0.2
    print(f"{name:30} within 0.2 nats of the entropy")

# This is why the failure is easy to miss. Such a curve begins like any other, and a monitor that only looks
# for NaN raises no alarm.
#
# ## Why clipping does not help
#
# Clipping shortens long gradients. But AdamW divides each gradient by its own running size, so a factor
# that is the same in all steps changes nothing. The cause of the failure is not a spike. The first steps of
# the optimiser have the full length, whatever the gradient. A warm-up shortens exactly these steps.
#
# The other two rescues change the start. Small weights make the branches add little, so the stream is still
# the embedding, and tokens differ. The output bias gives the head the frequencies from the start: the loss
# begins near the entropy, and the first steps are not spent on learning them. (Otherwise these steps change
# every layer, and all pull the tokens in one common direction.)

first = {name: run[0] for name, run in losses.items()}
print(
    f"first loss: as it comes {first['as it comes']:.2f}, bias {first['output bias = log frequencies']:.2f}"
)
assert first["output bias = log frequencies"] < first["as it comes"] - 0.5

# ## The picture

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
colors = ("#c44e2b", "#1f5a99", "#5b9bd5", "#2f8f6b", "#8a6d3b")
for (name, run), color in zip(losses.items(), colors, strict=True):
    smooth = F.avg_pool1d(torch.tensor(run)[None], 10, stride=5)[0]
    axes.plot(range(5, 5 * len(smooth) + 1, 5), smooth, color=color, label=name, linewidth=1.4)
axes.axhline(entropy, color="#555555", linewidth=1, linestyle=":")
axes.annotate("entropy of the bytes", (steps, entropy + 0.04), color="#555555", ha="right")
axes.set(title="five Post-LN runs", xlabel="step", ylabel="loss, nats", ylim=(2.2, 4.6))
axes.legend(frameon=False, fontsize=8, ncols=2)
plt.savefig("05_warmup_and_the_unigram_plateau.png", dpi=80)  # Two curves end on a line, three go below

# The lesson: compute the unigram entropy of your data before you start. If the loss stays within a tenth of
# a nat of it after a few hundred steps, the model no longer distinguishes tokens.
