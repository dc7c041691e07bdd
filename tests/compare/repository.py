"""A small git repository with a model in two files, for tests of `git:REV:path.py:factory`."""

import os
import subprocess
from pathlib import Path

BLOCKS = """from torch import nn

EPS = 1e-5


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.feed(self.norm(x))
"""
MODEL = """from torch import nn

from blocks import Block


class Model(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(depth))
        self.head = nn.Linear(16, 256)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(depth=2):
    print("printed by the factory")
    return Model(depth)
"""
IDENTITY = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")


def git(folder: Path, *words: str) -> str:
    """Call git in `folder`; return its output."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", *IDENTITY, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write(folder: Path, eps: str = "1e-5") -> None:
    """Write the model's two files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "blocks.py").write_text(BLOCKS.replace("EPS = 1e-5", f"EPS = {eps}"))
    (folder / "model.py").write_text(MODEL)


def repository(folder: Path) -> Path:
    """A repository whose second commit changed ε from 1e-5 to 1e-6."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q", "-b", "main")
    for number, eps in enumerate(("1e-5", "1e-6")):
        write(folder, eps)
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", f"{number}")
    return folder
