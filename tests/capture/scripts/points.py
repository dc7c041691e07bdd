"""A tiny classifier of sequences of numbers, which are no tokens, trained for 400 steps."""

import torch
from torch import nn

SIZE, LENGTH, CLASSES = 16, 8, 4


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.places = nn.Linear(2, SIZE), nn.Parameter(0.1 * torch.randn(LENGTH, SIZE))
        layer = nn.TransformerEncoderLayer(SIZE, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(SIZE), enable_nested_tensor=False)
        self.head = nn.Linear(SIZE, CLASSES)

    def forward(self, points):
        return self.head(self.encoder(self.enter(points) + self.places).mean(1))


torch.manual_seed(0)
torch.set_num_threads(1)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(400):
    classes = torch.randint(CLASSES, (32,))
    angles = 1.5 * classes[:, None] + torch.rand(32, LENGTH)
    points = torch.stack([angles.cos(), angles.sin()], 2)
    loss = nn.functional.cross_entropy(model(points), classes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
