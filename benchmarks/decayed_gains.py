"""Gains of the norms after 2000 steps of AdamW with weight decay on all weights, for NS711.

    python -m benchmarks.decayed_gains

A Pre-LN decoder of 3 blocks and width 32 on the bytes of the standard library's source. Printed is the mean
gain of all norms; they start at 1.
"""

import itertools

import torch

from normscope import load

MODEL = "nn:decoder,scheme=pre,depth=3,width=32,heads=2"
RATE, STEPS, DECAYS = 3e-3, 2000, (0.0, 0.01, 0.1)


def mean_gain(decay: float) -> float:
    """Mean gain at the end of a run with this decay."""
    subject = load(MODEL, seed=0)
    optimizer = torch.optim.AdamW(subject.model.parameters(), lr=RATE, weight_decay=decay)
    for batch in itertools.islice(subject.batches(), STEPS):
        optimizer.zero_grad()
        subject.loss(batch).backward()
        optimizer.step()
    gains = [
        weight.detach()
        for name, weight in subject.model.named_parameters()
        if "norm" in name and name.endswith("weight")
    ]
    return float(torch.cat(gains).mean())


def main() -> None:
    torch.set_num_threads(1)
    for decay in DECAYS:
        print(
            f"decay {decay:g}: mean gain {mean_gain(decay):.2f} after {STEPS} steps at {RATE:g}", flush=True
        )


if __name__ == "__main__":
    main()
