"""A training script: a T5 that copies sequences, for `normscope check --forecast -- python ...`.

    python benchmarks/regimes/copying.py [--lr LR] [--seed N]

It prints the mean loss of the last 20 of 300 steps, beside the loss without the input, which is the entropy
of the targets' frequencies. A sequence has 6 to 12 tokens of unlike frequencies and an end. The model led to
the rule that a long trial must show by its loss that it trains, see docs/forecast-rule.md.
"""

import argparse

import torch
from transformers import T5Config, T5ForConditionalGeneration

STEPS, LAST, SEQUENCES, LONGEST, TOKENS = 300, 20, 16, 12, 60
END, FIRST = 1, 3
IGNORED = -100


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    config = T5Config(
        vocab_size=64,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
    )
    config.decoder_start_token_id = 0
    model = T5ForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    losses, counts = [], torch.zeros(64)
    for _ in range(STEPS):
        source, target = batch()
        loss = model(input_ids=source, attention_mask=(source != 0).long(), labels=target).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        counts += torch.bincount(target[target != IGNORED], minlength=64)
    entropy = torch.distributions.Categorical(counts).entropy()
    print(f"{options.lr:g}: {sum(losses[-LAST:]) / LAST:.3f}, without the input {float(entropy):.3f}")


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences with their ends, padded, and the same as targets, each (SEQUENCES, LONGEST + 1)."""
    lengths = torch.randint(LONGEST // 2, LONGEST + 1, (SEQUENCES, 1))
    places = torch.arange(LONGEST + 1)
    tokens = torch.multinomial(1 / torch.arange(1.0, TOKENS + 1), SEQUENCES * (LONGEST + 1), True) + FIRST
    source = tokens.view(SEQUENCES, -1).where(places < lengths, 0).masked_fill(places == lengths, END)
    return source, source.masked_fill(source == 0, IGNORED)


if __name__ == "__main__":
    main()
