"""`normscope bench plan`: predicted against measured peaks of training steps, with and without recomputation.

The prediction follows fake tensors. The measurement is the count of the CPU's allocator, from PyTorch's
profiler, over a copy of the model, its optimizer and two steps.
"""

import copy
import dataclasses
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks.process import Row
from normscope.claims.allocations import peak_bytes
from normscope.planning import Plan, in_words, plan, recompute
from normscope.planning.making import with_loss
from normscope.planning.step import makes
from normscope.subjects import Subject, load, make_subject
from normscope.subjects.feed import map_tensors

TURNS = 5


@dataclass(frozen=True)
class Case:
    """A model and its step; `share` is the memory limit as a share of the peak, None without one."""

    model: str
    optimizer: str = "adamw"
    share: float | None = None
    batch_size: int = 4
    seq_len: int = 64
    precision: str = "float32"


_LLAMA = (
    "hidden_size=256,num_hidden_layers=6,num_attention_heads=4,num_key_value_heads=2,intermediate_size=704,"
    "vocab_size=4000"
)
_MIXTRAL = (
    "hidden_size=128,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,intermediate_size=256,"
    "vocab_size=2000"
)
_BERT = "hidden_size=256,num_hidden_layers=4,num_attention_heads=4,intermediate_size=1024,vocab_size=2000"
_T5 = "d_model=256,d_ff=1024,num_layers=3,num_heads=4,d_kv=64,vocab_size=2000"
_VIT = "hidden_size=192,num_hidden_layers=6,num_attention_heads=3,intermediate_size=768"
CASES = (
    Case("nn:decoder,scheme=pre,depth=12,width=256", share=0.6, batch_size=8, seq_len=256),
    Case("nn:decoder,scheme=post,depth=4,width=128", "sgd"),
    Case("nn:decoder,scheme=mhc,depth=6,width=128", "muon", 0.6, seq_len=128),
    Case("nn:encoder-decoder,depth=4,width=192", "adamw", 0.7, 8, 128),
    Case("nn:decoder,scheme=peri,depth=6,width=256,dropout=0.1", "adam", 0.8, 8, 256, "bfloat16"),
    Case("hf:gpt2,n_layer=6,n_embd=256,n_head=4,vocab_size=2000", "adamw", 0.7, 8, 256),
    Case("hf:gpt2", "adafactor", None, 2, 128),
    Case(f"hf:llama,{_LLAMA}", "adamw", 0.7, 4, 256),
    Case(f"hf:bert,{_BERT}", "sgd", 0.8, 8, 128),
    Case(f"hf:t5,{_T5}", "adafactor", 0.85, 8, 128),
    Case(f"hf:vit,{_VIT}", "adamw", 0.6, 8),
    Case(f"hf:mixtral,{_MIXTRAL}", "adamw", 0.8, 8, 128),
    Case("hf:mamba,hidden_size=128,num_hidden_layers=4,vocab_size=2000", "adamw", 0.7, 4, 64),
    Case("torch.nn.TransformerEncoder", "adamw", 0.6, 8, 128),
)


def bench_plan(cases: Sequence[Case] = CASES) -> list[Row]:
    """One row a model and limit: predicted and measured peak, and the time that recomputation adds."""
    rows = []
    for case in cases:
        for limited in (False, True)[: 1 + (case.share is not None)]:
            print(f"plan: {case.model}", file=sys.stderr, flush=True)
            rows.append(_row(case, limited))
    return rows


def _row(case: Case, limited: bool) -> Row:
    subject = subject_of(case)
    sizes = {"optimizer": case.optimizer, "precision": case.precision}
    made = planned(case, None, sizes)
    if limited and case.share is not None:
        made = planned(case, int(case.share * made.before.peak), sizes)
    seen = measured_peak(subject, case, made.recompute)
    added = added_time(subject, case, made.recompute) if made.recompute else 0.0
    return {
        "model": case.model.partition(",h")[0] if case.model.startswith("hf") else case.model,
        "batch": f"{case.batch_size} x {case.seq_len}",
        "step": f"{case.optimizer}, {case.precision}",
        "recomputed": len(made.recompute),
        "predicted": in_words(made.peak),
        "measured": in_words(seen),
        "predicted/measured": round(made.peak / seen, 4),
        "added flops": round(made.added_flops, 3),
        "added time, estimated": round(made.added_time, 3),
        "added time, measured": round(added, 3),
        "tensors": made.tensors,
    }


def planned(case: Case, memory: int | None, options: dict[str, str]) -> Plan:
    """The plan as a user gets it."""
    if case.model.startswith("torch."):
        return plan(subject_of(case), memory, **options)  # type: ignore[arg-type]
    return plan(case.model, memory, batch_size=case.batch_size, seq_len=case.seq_len, **options)  # type: ignore[arg-type]


def subject_of(case: Case) -> Subject:
    """The case's model with real weights."""
    if not case.model.startswith("torch."):
        return load(case.model, batch_size=case.batch_size, seq_len=case.seq_len)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True)
    stack = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return make_subject(stack, torch.randn(case.batch_size, case.seq_len, 256))


def measured_peak(subject: Subject, case: Case, paths: Sequence[str]) -> int:
    """Peak bytes of two steps, the model and the optimizer included, by the allocator's own events."""

    def run() -> None:
        step, _ = stepper(subject, case, paths)
        step()
        step()

    gc.collect()
    return peak_bytes(run)


def stepper(subject: Subject, case: Case, paths: Sequence[str]) -> tuple[Callable[[], None], nn.Module]:
    """A step of a copy of the model, and the copy."""
    model = copy.deepcopy(subject.model).train()
    batch = map_tensors(Tensor.clone, subject.batch)
    own = with_loss(dataclasses.replace(subject, model=model, batch=batch))
    recompute(model, paths)
    optimizers = makes(case.optimizer)(model)
    dtype = getattr(torch, case.precision)

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=case.precision != "float32"):
            loss = own.loss()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()

    return step, model


def added_time(subject: Subject, case: Case, paths: Sequence[str]) -> float:
    """Time of forward and backward pass with recomputation, over without, minus 1; medians of turns."""
    steps = [stepper(subject, dataclasses.replace(case, optimizer="sgd"), each)[0] for each in ((), paths)]
    times: list[list[float]] = [[], []]
    for turn in range(TURNS + 1):
        for kept, step in zip(times, steps, strict=True):
            start = time.process_time()
            step()
            if turn:
                kept.append(time.process_time() - start)
    return median(times[1]) / median(times[0]) - 1
