"""A tiny language model whose text is easy to predict: trained for as many steps as the first argument says.

With the argument `fails`, it raises after these steps. Others set the rate, the optimizer, a linear
warm-up, the seconds between steps, and the batches of a step, of which every fifth step has but one, as the
last one of an epoch may: `lr=1 optimizer=SGD warmup=100 pause=0.1 parts=2`.
"""

import sys
import time

import torch
from torch import nn

SIZE, LENGTH = 16, 16
options = {"lr": "3e-3", "optimizer": "AdamW", "warmup": "1", "pause": "0", "parts": "1"} | dict(
    word.split("=") for word in sys.argv if "=" in word
)
SYMBOLS = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8])  # of unlike frequencies


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.places = nn.Embedding(16, SIZE), nn.Embedding(LENGTH, SIZE)
        layer = nn.TransformerEncoderLayer(SIZE, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(SIZE), enable_nested_tensor=False)
        self.head = nn.Linear(SIZE, 16)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.embedding(ids) + self.places.weight
        return self.head(self.encoder(hidden, mask=mask, is_causal=True))


torch.manual_seed(0)
torch.set_num_threads(1)
model = Tiny()
for parameter in model.encoder.parameters():
    if parameter.dim() > 1:
        nn.init.xavier_uniform_(parameter)
optimizer = getattr(torch.optim, options["optimizer"])(model.parameters(), lr=float(options["lr"]))
warmup = int(options["warmup"])
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / warmup))
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    parts = 1 if step % 5 == 4 else int(options["parts"])
    for _ in range(parts):
        first, stride = torch.randint(16, (8, 1)), torch.randint(1, 4, (8, 1))
        ids = SYMBOLS[(first + stride * torch.arange(LENGTH + 1)) % 16]
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        (loss / parts).backward()
    optimizer.step()
    scheduler.step()
    time.sleep(float(options["pause"]))
if "fails" in sys.argv:
    raise RuntimeError("the data ended")
