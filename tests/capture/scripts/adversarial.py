"""dcgan's loop, rebuilt with Transformers: two models, two optimizers, three backwards a step."""

import torch
from parts import LENGTH, WIDTH, Block, Decoder, batches
from torch import nn

torch.manual_seed(0)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, noise):
        return self.head(self.norm(self.blocks(noise)))


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(WIDTH) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(self.norm(self.blocks(x))).mean(1).squeeze(-1)


generator, critic, embedding = Generator(), Critic(), Decoder().embedding.requires_grad_(False)
criterion = nn.BCEWithLogitsLoss()
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_critic = torch.optim.Adam(critic.parameters(), lr=4e-4, betas=(0.5, 0.999))
for step, (ids, _) in enumerate(batches(), 1):
    real, noise = embedding(ids), torch.randn(8, LENGTH, WIDTH)
    of_critic.zero_grad()
    right = criterion(critic(real), torch.ones(8))
    right.backward()
    fake = generator(noise)
    wrong = criterion(critic(fake.detach()), torch.zeros(8))
    wrong.backward()
    print("critic", step, (right.item() + wrong.item()) / 2, flush=True)
    of_critic.step()
    of_generator.zero_grad()
    fooled = criterion(critic(fake), torch.ones(8))
    fooled.backward()
    print("generator", step, fooled.item(), flush=True)
    of_generator.step()
