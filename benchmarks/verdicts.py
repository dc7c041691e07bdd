"""Test of the verdicts: check the nn.TransformerEncoder cases, then train each and compare.

    python -m benchmarks.verdicts --text FILE [--threads 2]

The model is 12 layers of `nn.TransformerEncoderLayer`, d = 256, causal, Xavier weights, bytes of FILE, Adam,
batches of 4 × 64. "Trains" means that after 300 steps the mean loss of the last 20 is at least 0.1 nats below
the text's unigram entropy; the loss at step 160 is also given. The output is the Markdown table of
docs/verdicts.md.
"""

import argparse
from pathlib import Path

import torch

from normscope import check, load
from normscope.demo.examples import CausalEncoder
from normscope.train import CRITERION_STEPS, last_loss, trains

EXAMPLES = "normscope.demo.examples"
CASES = (
    ("Post-LN", f"{EXAMPLES}:post_ln", 1e-3),
    ("Post-LN", f"{EXAMPLES}:post_ln", 3e-4),
    ("Post-LN", f"{EXAMPLES}:post_ln", 1e-4),
    ("Pre-LN, final norm", f"{EXAMPLES}:pre_ln", 1e-3),
    ("Pre-LN, no final norm", f"{__file__}:pre_no_final", 1e-3),
)

LOOKS = (160, CRITERION_STEPS)


def pre_no_final() -> torch.nn.Module:
    return CausalEncoder(norm_first=True)


def losses_of(factory: str, lr: float, text: Path) -> tuple[list[float], float]:
    """Training losses of `CRITERION_STEPS` steps, and the unigram entropy, in nats."""
    subject = load(factory, text=text)
    optimizer = torch.optim.Adam(subject.model.parameters(), lr=lr)
    subject.model.train()
    losses = []
    for _, batch in zip(range(CRITERION_STEPS), subject.batches(), strict=False):
        optimizer.zero_grad()
        loss = subject.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert subject.unigram_entropy is not None
    return losses, subject.unigram_entropy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # denormals make collapsed runs ten times slower
    columns = ["model", "rate", "verdict", "forecast", *(f"loss at {n}" for n in LOOKS), "unigram", "trained"]
    print("|", " | ".join([*columns, "right"]), "|")
    print("|---" * (len(columns) + 1) + "|")
    for title, factory, lr in CASES:
        report = check(load(factory, text=arguments.text), optimizer="adam", lr=lr)
        losses, unigram = losses_of(factory, lr, arguments.text)
        trained = trains(losses, unigram)
        right = (report.verdict == "will fail") != trained
        assert report.forecast is not None
        seen = " | ".join(f"{loss:.2f}" for loss in (*(last_loss(losses[:look]) for look in LOOKS), unigram))
        says = ("yes" if trained else "no", "yes" if right else "NO")
        said = f"{title} | {lr:g} | {report.verdict} | {report.forecast.reason}"
        print(f"| {said} | {seen} | {' | '.join(says)} |", flush=True)


if __name__ == "__main__":
    main()
