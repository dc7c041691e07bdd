"""Forecast against truth: forecast a grid of small models, train each for 300 steps, compare.

    python benchmarks/forecast_grid.py run tuning   --text FILE --output tuning.jsonl
    python benchmarks/forecast_grid.py run held-out --output held-out.jsonl     # standard library text
    python benchmarks/forecast_grid.py table held-out.jsonl

Thresholds were set on `tuning` alone; `held-out` has other widths, seeds, depths and another text, and is
what docs/forecast.md reports. Cells already in the output are skipped, so a run can be taken up again.
"""

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normscope.anatomy import read_anatomy
from normscope.probes import ForecastStep
from normscope.probes.forecast import forecast
from normscope.probes.forecast_rule import pull
from normscope.subjects import Subject, load, make_subject
from normscope.train import Trial, TrialConfig, endless, in_flushed_thread

TRUTH_STEPS = 300
LAST = 20  # steps whose mean loss is the run's
MARGIN = 0.1  # nats under the unigram entropy
STILL_FALLING = 0.3  # nats in the last 60 steps: a run that only needs more steps


class Encoder(nn.Module):
    """Language model of `nn.TransformerEncoder` as people build it first, causal."""

    def __init__(
        self,
        depth: int = 12,
        width: int = 256,
        heads: int = 4,
        norm_first: bool = False,
        xavier: bool = True,
        dropout: float = 0.1,
        positions: bool = False,
        batch_first: bool = True,
        scale: bool = False,
        feed_forward: int = 4,
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, heads, feed_forward * width, dropout, batch_first=batch_first, norm_first=norm_first
        )
        final = nn.LayerNorm(width) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, depth, norm=final, enable_nested_tensor=False)
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Embedding(512, width) if positions else None
        self.head = nn.Linear(width, 256)
        self.scale = math.sqrt(width) if scale else 1.0
        self.batch_first = batch_first
        for parameter in self.parameters():
            if xavier and parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Next-token logits (B, T, 256)."""
        length = ids_BT.shape[1]
        x_BTC = self.embedding(ids_BT) * self.scale
        if self.positions is not None:
            x_BTC = x_BTC + self.positions(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = x_BTC if self.batch_first else x_BTC.transpose(0, 1)
        x = self.encoder(x, mask=mask, is_causal=True)
        return self.head(x if self.batch_first else x.transpose(0, 1))


@dataclass(frozen=True)
class Cell:
    """One model and how it is trained; `model` is a MODEL spec or options of `Encoder`."""

    model: str | dict[str, Any]
    lr: float
    optimizer: str = "adam"
    seed: int = 0
    warmup: int = 0
    steps: int = TRUTH_STEPS  # fewer: a large published model, the forecast alone

    @property
    def name(self) -> str:
        """Unique in a grid."""
        return json.dumps(asdict(self), sort_keys=True)


def tuning() -> Iterator[Cell]:
    """Tinyshakespeare, widths 64 and 128."""
    for lr in (1e-4, 3e-4, 1e-3):
        for depth in (6, 12, 24):
            yield Cell({"width": 128, "depth": depth}, lr, seed=1)
    for lr in (3e-4, 1e-3, 3e-3):
        for depth in (6, 12):
            yield Cell({"width": 64, "depth": depth}, lr, seed=2)
    for lr in (1e-3, 1e-2):
        yield Cell({"width": 64, "norm_first": True}, lr)


def held_out() -> Iterator[Cell]:
    """Other widths, depths, seeds, heads, and another text."""
    for lr in (1e-4, 2e-4, 5e-4, 1e-3, 2e-3):
        for depth in (4, 10, 16):
            yield Cell({"width": 96, "depth": depth, "heads": 6, "positions": True}, lr, seed=7)
    for lr in (5e-4, 2e-3, 5e-3):
        yield Cell({"width": 96, "depth": 16, "heads": 6, "norm_first": True}, lr, seed=8)
    for lr in (2e-4, 5e-4, 1e-3):
        yield Cell({"width": 96, "depth": 10, "heads": 6, "xavier": False}, lr, seed=9)
        yield Cell({"width": 160, "depth": 12, "heads": 5, "scale": True, "dropout": 0.0}, lr, seed=10)
    for kind, options in _SMALL.items():
        for lr in (3e-4, 1e-3):
            yield Cell(f"hf:{kind},{options}", lr, "adamw", seed=11)


def issue() -> Iterator[Cell]:
    """pytorch/pytorch#55270: 12 layers, width 256, tinyshakespeare."""
    for seed in (0, 1):
        for lr in (1e-3, 3e-4, 1e-4):
            yield Cell({}, lr, seed=seed)
    yield Cell({"norm_first": True}, 1e-3)


def published() -> Iterator[Cell]:
    """Architectures as published, at the size that a 2-core machine can hold; the forecast alone."""
    for kind in ("gpt2", "vit", "t5", "bert", "opt,do_layer_norm_before=false"):
        yield Cell(f"hf:{kind}", 1e-4 if kind == "bert" else 3e-4, "adamw", steps=0)
    for kind, options in _MEDIUM.items():
        yield Cell(f"hf:{kind},{options}", 3e-4, "adamw", steps=0)


_SMALL = {
    "gpt2": "n_layer=10,n_embd=96,n_head=6,vocab_size=512",
    "opt": "num_hidden_layers=10,hidden_size=96,word_embed_proj_dim=96,ffn_dim=384,num_attention_heads=6,"
    "vocab_size=512,do_layer_norm_before=false",
    "llama": "num_hidden_layers=10,hidden_size=96,intermediate_size=256,num_attention_heads=6,vocab_size=512",
    "olmo2": "num_hidden_layers=10,hidden_size=96,intermediate_size=256,num_attention_heads=6,vocab_size=512",
}
_512 = "num_hidden_layers=12,hidden_size=512,num_attention_heads=8"
_MEDIUM = {
    "llama": f"{_512},intermediate_size=1376,vocab_size=32000",
    "olmo2": f"{_512},intermediate_size=1376,vocab_size=32000",
    "gemma2": f"{_512},intermediate_size=1376,num_key_value_heads=4,head_dim=64,vocab_size=32000",
    "modernbert": f"{_512},intermediate_size=768",
}
GRIDS = {"tuning": tuning, "held-out": held_out, "issue": issue, "published": published}


def run(cell: Cell, text: Path | None) -> dict[str, Any]:
    """Forecast, then truth."""
    subject = _subject(cell, text)
    config = TrialConfig(optimizer=cell.optimizer, lr=cell.lr, warmup=cell.warmup, seed=cell.seed)
    started = time.perf_counter()
    said = forecast(subject, read_anatomy(subject), config)
    seconds = time.perf_counter() - started
    row = {"cell": asdict(cell), "forecast": said.to_dict(), "forecast_seconds": seconds}
    if cell.steps:
        losses = in_flushed_thread(lambda checkpoint: _train(subject, config, cell.steps))
        row |= {"losses": [round(loss, 4) for loss in losses], "truth": _truth(losses, subject)}
    return row


def _subject(cell: Cell, text: Path | None) -> Subject:
    if isinstance(cell.model, str):
        return load(cell.model, seed=cell.seed, text=text)
    torch.manual_seed(cell.seed)
    return make_subject(Encoder(**cell.model), seed=cell.seed, text=text)


def _train(subject: Subject, config: TrialConfig, steps: int) -> list[float]:
    torch.manual_seed(config.seed)
    model = subject.model.train()
    trial = Trial(model, endless(subject.batches), lambda m, b: subject.loss(b, m), config, config.warmup)
    while trial.step < steps and not trial.diverged:
        trial.advance()
    return trial.losses


def _truth(losses: list[float], subject: Subject) -> str:
    """ "trains", "stuck", or "slow" for a run above the unigram entropy that is still falling fast."""
    mean = sum(losses[-LAST:]) / LAST
    before = sum(losses[-80:-60]) / LAST
    if subject.unigram_entropy is None or not math.isfinite(mean):
        return "stuck" if not math.isfinite(mean) else "unknown"
    if mean <= subject.unigram_entropy - MARGIN:
        return "trains"
    return "slow" if before - mean > STILL_FALLING else "stuck"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: what was said against what came."""
    truths = ("trains", "slow", "stuck")
    counts = Counter((row["forecast"]["outcome"], row["truth"]) for row in rows if "truth" in row)
    lines = ["| forecast | " + " | ".join(truths) + " |", "|---" * (len(truths) + 1) + "|"]
    for outcome in dict.fromkeys(outcome for outcome, _ in counts):
        lines.append(f"| {outcome} | " + " | ".join(str(counts[outcome, t]) for t in truths) + " |")
    lines += ["", "| model | rate | diversity, last look | pull | forecast | truth, nats from unigram |"]
    lines += ["|---" * 6 + "|", *(_table_row(row) for row in rows if "truth" in row)]
    return "\n".join(lines)


def _table_row(row: dict[str, Any]) -> str:
    last = ForecastStep(**row["forecast"]["curve"][-1])
    strength, diversity = pull(last), list(last.diversity.values())[-1]
    said = row["forecast"]["outcome"] + ("" if _is_right(row) else " **wrong**")
    gap = sum(row["losses"][-LAST:]) / LAST - row["forecast"]["unigram_entropy"]
    cells = (
        _model_in_words(row["cell"]["model"]),
        f"{row['cell']['optimizer']} {row['cell']['lr']:g}",
        f"{diversity:.0e}",
        "–" if strength is None else f"{strength:.2f}",
        said,
        f"{row['truth']} ({gap:+.2f})",
    )
    return f"| {' | '.join(cells)} |"


def _is_right(row: dict[str, Any]) -> bool:
    return (row["forecast"]["outcome"] == "trains") == (row["truth"] == "trains")


def _model_in_words(model: str | dict[str, Any]) -> str:
    if isinstance(model, str):
        words = {"gpt2": "GPT-2", "opt": "OPT", "llama": "LLaMA", "olmo2": "OLMo-2"}
        kind = model.removeprefix("hf:").split(",")[0]
        post = ", Post-LN" if "do_layer_norm_before=false" in model else ""
        return f"{words.get(kind, kind)}, 10 layers, d 96{post}"
    words = f"{'Pre' if model.get('norm_first') else 'Post'}-LN, {model['depth']} layers, d {model['width']}"
    if not model.get("xavier", True):
        words += ", PyTorch's initialisation"
    return words + (", ×√d embeddings, no dropout" if model.get("scale") else "")


def _summary(row: dict[str, Any]) -> str:
    said = row["forecast"]
    seen = [f"{next(reversed(s['diversity'].values()), math.nan):.0e}" for s in said["curve"]]
    pull = said["curve"][-1]["coherence"] if said["curve"] else None
    cell = row["cell"]
    return (
        f"{cell['model']} {cell['optimizer']} {cell['lr']:g}: {said['outcome']} (truth {row.get('truth')}), "
        f"diversity {' '.join(seen)}, coherence {pull}, {row['forecast_seconds']:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    runs.add_argument("grid", choices=GRIDS)
    runs.add_argument("--text", type=Path)
    runs.add_argument("--output", type=Path, required=True)
    commands.add_parser("table").add_argument("runs", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "table":
        print(table([json.loads(line) for path in options.runs for line in path.read_text().splitlines()]))
        return
    done = options.output.read_text().splitlines() if options.output.exists() else []
    known = {json.dumps(json.loads(line)["cell"], sort_keys=True) for line in done}
    for cell in GRIDS[options.grid]():
        if cell.name not in known:
            row = run(cell, options.text)
            with options.output.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(_summary(row), flush=True)


if __name__ == "__main__":
    main()
