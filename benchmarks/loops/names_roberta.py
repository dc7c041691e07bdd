"""A training script: a small RoBERTa that fills in masked words of the names of Unicode's characters.

    python benchmarks/loops/names_roberta.py [--lr LR] [--seed N]

Words are masked anew in each batch, by the collate function of the DataLoader.
"""

import argparse
import collections
import json
import unicodedata
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import RobertaConfig, RobertaForMaskedLM

STEPS, LAST, SEQUENCES, TOKENS, VOCABULARY = 300, 20, 20, 32, 320
BEGIN, PAD, END, OTHER, MASK, FIRST = 0, 1, 2, 3, 4, 5
IGNORED = -100


def read_names() -> list[Tensor]:
    """Windows (T,) of the words of all names without digits, in the order of the characters."""
    names = (unicodedata.name(chr(i), "") for i in range(0x20000) if not 0xAC00 <= i < 0xD7A4)
    split = [name.split() for name in names if name and not any(map(str.isdigit, name))]
    common = collections.Counter(word for name in split for word in name).most_common(VOCABULARY - FIRST)
    ids = {word: i for i, (word, _) in enumerate(common, FIRST)}
    text = torch.tensor([i for name in split for i in [*(ids.get(word, OTHER) for word in name), END]])
    return list(text.unfold(0, TOKENS - 1, TOKENS - 1))


def collate(windows: list[Tensor]) -> dict[str, Tensor]:
    """A batch in which 15 % of the words are hidden: 80 % of them by the mask, 10 % by another word."""
    ids = torch.stack([torch.cat([torch.tensor([BEGIN]), window]) for window in windows])
    hidden = (torch.rand(ids.shape) < 0.15) & (ids >= OTHER)
    labels = ids.masked_fill(~hidden, IGNORED)
    chance = torch.rand(ids.shape)
    others = torch.randint(FIRST, VOCABULARY, ids.shape)
    ids = ids.masked_fill(hidden & (chance < 0.8), MASK)
    ids = torch.where(hidden & (chance >= 0.9), others, ids)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    config = RobertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=TOKENS + 2,
        type_vocab_size=1,
    )
    model = RobertaForMaskedLM(config)
    names: Any = read_names()  # a list is a dataset too
    loader: DataLoader[Any] = DataLoader(
        names, batch_size=SEQUENCES, shuffle=True, drop_last=True, collate_fn=collate
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, eps=1e-6, weight_decay=0.01)
    model.train()
    losses: list[float] = []
    targets = []
    while len(losses) < STEPS:
        for inputs in loader:
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            targets.append(inputs["labels"][inputs["labels"] != IGNORED])
            if len(losses) % 50 == 0:
                print(f"step {len(losses)}: loss {losses[-1]:.3f}")
            if len(losses) == STEPS:
                break
    print(json.dumps({"losses": losses, "counts": torch.bincount(torch.cat(targets[-LAST:])).tolist()}))


if __name__ == "__main__":
    main()
