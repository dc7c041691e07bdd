"""A training script: a small Qwen3 on docstrings of the standard library, with the Trainer of transformers.

python benchmarks/loops/docstrings_qwen.py [--lr LR] [--seed N]
"""

import argparse
import ast
import json
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments, set_seed

STEPS, LAST, SEQUENCES, TOKENS, VOCABULARY = 300, 20, 16, 32, 600


class Docstrings(Dataset[dict[str, Tensor]]):
    """Windows of the docstrings of the standard library, as ids of a BPE that is trained on them."""

    def __init__(self) -> None:
        texts = []
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-r]*.py")):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                    texts.append(ast.get_docstring(node) or "")
        tokenizer = Tokenizer(models.BPE(unk_token="[unk]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        special = ["[unk]", "[end]"]
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        ids = [i for each in tokenizer.encode_batch([text for text in texts if text]) for i in [*each.ids, 1]]
        self.windows = torch.tensor(ids).unfold(0, TOKENS, TOKENS)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[place], "labels": self.windows[place]}


class RecordingTrainer(Trainer):
    """A Trainer that keeps the loss and the targets of each step."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.losses: list[float] = []
        self.targets: list[Tensor] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        self.targets.append(inputs["labels"][:, 1:].flatten())
        loss: Any = super().compute_loss(model, inputs, *args, **options)
        self.losses.append(loss.item())
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    set_seed(options.seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=TOKENS,
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=SEQUENCES,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=options.seed,
        )
        trainer = RecordingTrainer(model=Qwen3ForCausalLM(config), args=settings, train_dataset=Docstrings())
        trainer.train()
    print(
        json.dumps(
            {"losses": trainer.losses, "counts": torch.bincount(torch.cat(trainer.targets[-LAST:])).tolist()}
        )
    )


if __name__ == "__main__":
    main()
