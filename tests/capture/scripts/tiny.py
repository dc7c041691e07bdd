"""A tiny language model whose text is easy to predict: trained for as many steps as the first argument says.

With a second argument, it raises after these steps.
"""

import sys

import torch
from torch import nn

SIZE, LENGTH = 16, 16
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
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(int(sys.argv[1])):
    first, stride = torch.randint(16, (8, 1)), torch.randint(1, 4, (8, 1))
    ids = SYMBOLS[(first + stride * torch.arange(LENGTH + 1)) % 16]
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if len(sys.argv) > 2:
    raise RuntimeError("the data ended")
