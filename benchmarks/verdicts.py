"""Were the verdicts right? Checks the nn.TransformerEncoder cases, then trains each and compares.

    python benchmarks/verdicts.py --text FILE [--steps 160] [--threads 2]

The model is 12 layers of `nn.TransformerEncoderLayer`, d = 256, causal, Xavier weights, bytes of FILE, Adam,
batches of 4 × 64. "Trains" means: the mean loss of the last 20 steps is at least 0.1 nats under the text's
unigram entropy. Prints a Markdown table, as kept in docs/verdicts.md.
"""

import argparse
import statistics
from pathlib import Path

import torch

from normscope import check, load
from normscope.bench.examples import CausalEncoder

CASES = (
    ("Post-LN", "post", 1e-3),
    ("Post-LN", "post", 3e-4),
    ("Post-LN", "post", 1e-4),
    ("Pre-LN, final norm", "pre", 1e-3),
    ("Pre-LN, no final norm", "pre_no_final", 1e-3),
)


def post() -> torch.nn.Module:
    return CausalEncoder()


def pre() -> torch.nn.Module:
    return CausalEncoder(norm_first=True, final_norm=True)


def pre_no_final() -> torch.nn.Module:
    return CausalEncoder(norm_first=True)


def last_losses(factory: str, lr: float, text: Path, steps: int) -> tuple[float, float]:
    """Mean training loss of the last 20 of `steps` Adam steps, and the unigram entropy, in nats."""
    subject = load(factory, text=text)
    optimizer = torch.optim.Adam(subject.model.parameters(), lr=lr)
    subject.model.train()
    losses = []
    for _, batch in zip(range(steps), subject.batches(), strict=False):
        optimizer.zero_grad()
        loss = subject.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert subject.unigram_entropy is not None
    return statistics.fmean(losses[-20:]), subject.unigram_entropy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # collapsed runs fill with denormals, ten times slower
    columns = ["model", "rate", "verdict", "forecast", f"loss after {arguments.steps}", "unigram", "trained"]
    print("|", " | ".join([*columns, "right"]), "|")
    print("|---" * (len(columns) + 1) + "|")
    for title, name, lr in CASES:
        factory = f"{Path(__file__)}:{name}"
        report = check(load(factory, text=arguments.text), optimizer="adam", lr=lr)
        loss, unigram = last_losses(factory, lr, arguments.text, arguments.steps)
        trained = loss <= unigram - 0.1
        right = (report.verdict == "will fail") != trained
        print(
            f"| {title} | {lr:g} | {report.verdict} | {report.forecast.reason} | {loss:.2f} | {unigram:.2f} "
            f"| {'yes' if trained else 'no'} | {'yes' if right else 'NO'} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
