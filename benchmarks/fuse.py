"""`normscope bench fuse`: training steps of Hugging Face models with their residual adds and norms fused.

The plain model and two fused copies, by the default backend and by "any" (compiled code where it was
measured to be faster), take turns in one process on the same batches. All have the same weights and seeds,
so that their losses can be compared step by step.
"""

import copy
import statistics
import time
from typing import Any

import torch

from benchmarks.process import Row, circumstances, in_fresh_process, median_ratio, row

STEPS, WARM = 25, 5
"""Steps in all, and the first ones, which are not timed."""
BATCH, LENGTH, VOCABULARY = 8, 128, 1000
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 256, "n_layer": 4, "n_head": 4},
    "llama": SIZES,
    "bert": SIZES,
}
BACKENDS: dict[str, Any] = {"default": None, "any": "any"}


def bench_fuse() -> list[Row]:
    """Two rows for each model: time beside the plain model, and the largest difference of the losses."""
    return [
        each for kind in MODELS for each in _rows(kind, in_fresh_process(measure, kind, OMP_NUM_THREADS="1"))
    ]


def _rows(kind: str, measured: dict[str, Any]) -> list[Row]:
    seconds, losses = measured["seconds"], measured["losses"]
    rows = []
    for name in BACKENDS:
        figure, quartiles = median_ratio(seconds[name], seconds["plain"])
        apart = max(abs(a - b) / b for a, b in zip(losses[name], losses["plain"], strict=True))
        plain_ms = 1e3 * statistics.median(seconds["plain"])
        how = f"{quartiles}; plain {plain_ms:.0f} ms; {measured['pairs']} pairs"
        how += f"; losses of {STEPS} steps differ by {apart:.1e} at most; {measured['threads']} thread"
        rows.append(row(f"{kind}: a training step fused, backend {name}, relative to plain", figure, "", how))
    return rows


def measure(kind: str) -> dict[str, Any]:
    """Seconds and losses of each step of the plain model and its fused copies."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    from normscope import fuse

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, pad_token_id=0, **MODELS[kind]
    )
    make = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    plain = make.from_config(config)
    models: dict[str, Any] = {"plain": plain} | {name: copy.deepcopy(plain) for name in BACKENDS}
    batches = [torch.randint(3, VOCABULARY, (BATCH, LENGTH)) for _ in range(STEPS)]
    pairs = [len(fuse(models[name], batches[0], backend=each).pairs) for name, each in BACKENDS.items()]
    optimizers = {name: torch.optim.AdamW(model.train().parameters(), 1e-3) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    losses: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    for number, ids in enumerate(batches):
        names = [*names[1:], names[0]]  # rotate, so that none is always first
        for name in names:
            torch.manual_seed(number)
            started = time.process_time()
            losses[name].append(_step(models[name], optimizers[name], ids))
            if number >= WARM:
                seconds[name].append(time.process_time() - started)
    threads = circumstances()["threads"]
    return {"seconds": seconds, "losses": losses, "pairs": pairs[0], "threads": threads}


def _step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())
