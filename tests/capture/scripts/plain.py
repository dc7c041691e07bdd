"""A training loop as people write it: Post-LN, or Pre-LN with `--pre`; normscope is not mentioned."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

DEPTH, WIDTH, VOCABULARY, LENGTH = 12, 64, 128, 64
pre = "--pre" in sys.argv


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=pre)
        norm = nn.LayerNorm(WIDTH) if pre else None
        self.encoder = nn.TransformerEncoder(layer, DEPTH, norm, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for parameter in self.encoder.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, ids):
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.embedding(ids) + self.positions(torch.arange(length))
        return self.head(self.encoder(hidden, mask=mask, is_causal=True))


torch.manual_seed(0)
model = LanguageModel()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
with open(torch.__file__, "rb") as file:
    data = torch.tensor([byte for byte in file.read() if byte < VOCABULARY])
for step in range(10_000):
    starts = torch.randint(0, len(data) - LENGTH - 1, (8,))
    inputs = torch.stack([data[i : i + LENGTH] for i in starts])
    targets = torch.stack([data[i + 1 : i + LENGTH + 1] for i in starts])
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item(), flush=True)
