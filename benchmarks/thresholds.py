"""Compare the rules' thresholds with the figures of published models and of broken models.

    python -m benchmarks.thresholds > docs/thresholds.md          (about ten minutes on two cores, 4 GB)
    python -m benchmarks.thresholds --only gpt2,post

Weights are random, seed 0; no step is taken. A threshold should lie beyond the figure of every published
model, but not beyond that of the model that is broken in this respect.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.broken import (
    AttentionOnly,
    Change,
    Unnormed,
    changed,
    dead,
    epsilon,
    nan_weight,
    queries_and_keys,
    scaled,
    wrong_backward,
)
from normscope.anatomy import read_anatomy
from normscope.demo.examples import CausalEncoder
from normscope.probes import PROBES, Measurements
from normscope.rules import Case, judge, verdict
from normscope.rules import figures as fig
from normscope.subjects import Subject, load, make_subject

SMALL = "hidden_size=64,intermediate_size=128,num_hidden_layers=4,num_attention_heads=4"
LARGE = "hidden_size=1024,intermediate_size=2816,num_hidden_layers=16,num_attention_heads=16"
PUBLISHED = {
    "GPT-2": "hf:gpt2",
    "GPT-2 small": "hf:gpt2,n_layer=4,n_embd=64,n_head=4",
    "LLaMA": f"hf:llama,{LARGE},num_key_value_heads=16,vocab_size=4096",
    "LLaMA small": f"hf:llama,{SMALL},num_key_value_heads=4,vocab_size=512",
    "ViT": "hf:vit",
    "ViT small": f"hf:vit,{SMALL},image_size=32,patch_size=8",
    "T5": "hf:t5",
    "T5 small": "hf:t5,d_model=64,d_kv=16,d_ff=128,num_layers=4,num_heads=4,vocab_size=512",
    "OLMo-2": f"hf:olmo2,{LARGE},num_key_value_heads=16,vocab_size=4096",
    "OLMo-2 small": f"hf:olmo2,{SMALL},num_key_value_heads=4,vocab_size=512",
    "Gemma-2": "hf:gemma2,hidden_size=768,intermediate_size=3072,num_hidden_layers=26,num_attention_heads=4,"
    "num_key_value_heads=2,head_dim=256,vocab_size=4096",
    "Gemma-2 small": f"hf:gemma2,{SMALL},num_key_value_heads=2,head_dim=16,vocab_size=512",
    "ModernBERT": "hf:modernbert,vocab_size=8192,pad_token_id=0",
    "ModernBERT small": f"hf:modernbert,{SMALL},vocab_size=512,pad_token_id=0",
    "BERT": "hf:bert",
    "BERT, 24 blocks": "hf:bert,num_hidden_layers=24,hidden_size=512,num_attention_heads=8,"
    "intermediate_size=2048",
}


def encoder(depth: int = 12, change: Change | None = None, **options: bool) -> nn.Module:
    """A causal nn.TransformerEncoder, by default Pre-LN with a final norm, after `change`."""
    return changed(CausalEncoder(depth, 128, **{"norm_first": True, "final_norm": True} | options), change)


def copies(model: nn.Module) -> None:
    """Give every block the weights of the first."""
    first, *others = model.get_submodule("encoder.layers").children()
    for layer in others:
        layer.load_state_dict(first.state_dict())


OURS: dict[str, Callable[[], nn.Module]] = {
    "Pre-LN 12": lambda: encoder(),
    "Pre-LN 48": lambda: encoder(48),
    "Post-LN 12": lambda: encoder(norm_first=False, final_norm=False),
    "Post-LN 24": lambda: encoder(24, norm_first=False, final_norm=False),
    "Post-LN 48": lambda: encoder(48, norm_first=False, final_norm=False),
    "Pre-LN, no final norm": lambda: encoder(final_norm=False),
    "Pre-LN, copies": lambda: encoder(change=copies),
    "no norm": lambda: Unnormed(128),
    "no norm, gain 2": lambda: Unnormed(128, 2.0, 2.0),
    "no norm, gain 0.3": lambda: Unnormed(128, 0.3, 0.3),
    "dead feed-forward": lambda: encoder(change=dead),
    "q, k × 5": lambda: encoder(change=queries_and_keys(5)),
    "q, k × 50": lambda: encoder(change=queries_and_keys(50)),
    "embeddings × 1e3": lambda: encoder(change=scaled("embedding", 1e3)),
    "embeddings × 1e6": lambda: encoder(change=scaled("embedding", 1e6)),
    "embeddings × 1e-3": lambda: encoder(change=scaled("embedding", 1e-3)),
    "ε = 1e-12": lambda: encoder(change=epsilon(1e-12)),
    "ε = 1": lambda: encoder(change=epsilon(1.0)),
    "ε = 100": lambda: encoder(change=epsilon(100.0)),
    "NaN weight": lambda: encoder(change=nan_weight),
    "two heads of 128": lambda: AttentionOnly(256, 2, 128**-0.5),
    "two heads of 128, without 1/√128": lambda: AttentionOnly(256, 2, 1.0),
    "no norm, a backward × 0.5": lambda: wrong_backward(128, 0.5),
    "no norm, a backward × 0.8": lambda: wrong_backward(128, 0.8),
}


@dataclass(frozen=True)
class Column:
    """One figure of a model, and its title in the table."""

    title: str
    of: Callable[[Case], list[float]]
    pick: Callable[[list[float]], float] = max

    def cell(self, case: Case) -> str:
        values = self.of(case)
        return f"{self.pick(values):.2g}" if values else "–"


def by_stack(figure: Callable[..., float | None]) -> Callable[[Case], list[float]]:
    return lambda case: [v for s in case.anatomy.stacks if (v := figure(case, s)) is not None]


def rows_of(quantity: str) -> Callable[[Case], list[float]]:
    return lambda case: list(case.finite(quantity).values())


def whole(quantity: str) -> Callable[[Case], list[float]]:
    return lambda case: [v for site, v in case.finite(quantity).items() if not site]


def gradient_ratio(case: Case) -> list[float]:
    pairs = [pair for s in case.anatomy.stacks if (pair := fig.relative_gradients(case, s))]
    return [first / last for first, last in pairs if last > 0]


def upper_quarter(case: Case) -> list[float]:
    return [pair[1] for s in case.anatomy.stacks if (pair := fig.decline(case, s))]


COLUMNS = (
    Column("median update ratio (101)", rows_of("branch/update-ratio"), statistics.median_high),
    Column("growth (201)", by_stack(fig.growth)),
    Column("diversity kept (202)", by_stack(fig.diversity_kept), min),
    Column("update ratio of the upper quarter (204)", upper_quarter, min),
    Column("smallest entropy of attention (205)", rows_of("attention/entropy"), min),
    Column("spread of logits (206)", rows_of("attention/logit-spread")),
    Column("gradient norm, first block over last (301, 302)", gradient_ratio, max),
    Column(
        "median gradient share of q, k (303)",
        lambda case: list(fig.qk_shares(case).values()),
        statistics.median_high,
    ),
    Column("relative error of the derivative (304)", rows_of("derivative/relative-error")),
    Column("relative gain, log10 (401)", by_stack(fig.relative_gain), lambda v: max(v, key=abs)),
    Column("float16 headroom (501)", whole("precision/float16-headroom"), min),
    Column("gradients flushed to zero in float16 (502)", whole("precision/float16-flushed")),
    Column("bfloat16 cosine (503)", whole("precision/bfloat16-cosine"), min),
    Column("ε ratio, median norm (505)", rows_of("precision/eps-ratio-median"), statistics.median_high),
    Column("ε ratio, worst norm (505)", rows_of("precision/eps-ratio-median"), max),
)


def measured(subject: Subject) -> Case:
    anatomy = read_anatomy(subject)
    table = Measurements()
    for probe in PROBES.values():
        table.extend(probe(subject, anatomy))
    return Case(anatomy, table)


def subjects(only: list[str]) -> Iterator[tuple[str, Subject]]:
    for name, spec in PUBLISHED.items():
        if not only or any(word in name for word in only):
            yield name, load(spec)
    for name, build in OURS.items():
        if not only or any(word in name for word in only):
            torch.manual_seed(0)
            yield name, make_subject(build(), spec=name)


HEAD = """\
# Figures behind the thresholds

A threshold must leave the published models healthy and detect the models that are broken on purpose. Each
column is the figure that a rule compares with its threshold; the rule's code is in brackets. Setting: random
weights, seed 0, 4 × 64 tokens, no training step, on a CPU. No GPU was measured. The findings are those of a
check without a trial.

Written by `python -m benchmarks.thresholds > docs/thresholds.md`."""

CLOSING = """\
NS206 notes a logit spread above 1 and warns above 2. Both limits come from theory: from 1 on a few keys
take the weight, from 2 on one key outweighs the others. In our runs (`python -m benchmarks.logit_spread`:
three Pre-LN blocks of width 64, 64 bytes of context, 300 steps of AdamW at 1e-3, two seeds, CPU) logits 2,
4, 8, 16 and 32 times as wide as with 1/√d_h cost 0.01 to 0.02, 0.04, 0.07 to 0.08, 0.12 to 0.13 and 0.17
nats. With normalised queries and keys the costs are within 0.02 nats of these. No run failed. A spread of 2
is a deviation of 5.8 over 64 keys. NS206 does not detect a missing factor 1/√d_h where the weights are
small. NS304 warns above a relative error of 0.02. All figures of the table are of one seed on a CPU.

NS102 warns where the RMS of the last state is under 1/2 or above 2, and is a note between them. In our
runs (`python -m benchmarks.final_norm`: Pre-LN decoders of width 48, 200 steps of AdamW at 1e-3 and 1e-2,
one seed, CPU) 2 blocks without a final norm ended 0.04 to 0.11 nats lower than with one; their stream had
an RMS of 1.65 at the start. 12 blocks (RMS 2.7) ended 0.05 to 0.12 nats lower. No run of more steps or
blocks was measured."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="parts of model names, with commas: gpt2,post")
    only = [word for word in parser.parse_args().only.split(",") if word]
    print(f"{HEAD}\n")
    print("| model |", " | ".join(column.title for column in COLUMNS), "| findings | verdict |")
    print("|---|", "---|" * (len(COLUMNS) + 2), sep="")
    for name, subject in subjects(only):
        case = measured(subject)
        found = judge(case.anatomy, case.table, None)
        codes = ", ".join(f"{f.code} {f.severity}" for f in found)
        cells = " | ".join(column.cell(case) for column in COLUMNS)
        print(f"| {name} | {cells} | {codes or 'none'} | {verdict(found)} |", flush=True)
    print(f"\n{CLOSING}")


if __name__ == "__main__":
    main()
