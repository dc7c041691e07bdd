"""Training steps of Hugging Face models on a GPU, plain and fused by the Triton kernels, in turns.

    python -m benchmarks.gpu.fused

8 blocks of width 1024, 8 × 512 tokens, no dropout; float32, and bfloat16 under autocast. docs/kernels.md has
the results.
"""

import copy
import json
import statistics
import time
from typing import Any

import torch

from normscope import fuse

STEPS, WARM = 25, 5
SIZES = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "intermediate_size": 4096}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 1024, "n_layer": 8, "n_head": 16}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "llama": SIZES,
    "bert": SIZES | NO_DROPOUT,
}


def measure(kind: str, precision: str) -> dict[str, Any]:
    """Time of a step relative to the plain one, peak memory of a step, and the difference of the losses."""
    models = _models(kind)
    batches = [torch.randint(3, 8000, (8, 512), device="cuda") for _ in range(STEPS)]
    pairs = len(fuse(models["fused"], batches[0], backend="triton").pairs)
    optimizers = {name: torch.optim.AdamW(model.train().parameters(), 1e-4) for name, model in models.items()}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in models}
    names = list(models)
    for ids in batches:
        names = [*names[1:], names[0]]  # rotate, so that none is always first
        for name in names:
            found[name].append(_step(models[name], optimizers[name], ids, precision))
    losses, seconds, peaks = zip(*found["fused"], strict=True)
    others, plain, before = zip(*found["plain"], strict=True)
    ratios = [ours / theirs for ours, theirs in zip(seconds[WARM:], plain[WARM:], strict=True)]
    return {
        "model": kind,
        "precision": precision,
        "pairs": pairs,
        "ratio_quartiles": [round(each, 3) for each in statistics.quantiles(ratios, n=4)],
        "plain_ms": round(1e3 * statistics.median(plain[WARM:]), 1),
        "losses_apart": max(abs(a - b) / b for a, b in zip(losses, others, strict=True)),
        "peak_mib": [round(peaks[-1]), round(before[-1])],
    }


def _models(kind: str) -> dict[str, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    torch.manual_seed(0)
    ids = {"vocab_size": 8000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **ids, **MODELS[kind])
    make = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    plain = make.from_config(config).cuda()
    return {"plain": plain, "fused": copy.deepcopy(plain)}


def _step(
    model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor, precision: str
) -> tuple[float, float, float]:
    """Loss, seconds, and MiB at the peak above those before the step."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, started = torch.cuda.memory_allocated(), time.perf_counter()
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
        loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return float(loss.detach()), seconds, (torch.cuda.max_memory_allocated() - held) / 2**20


def main() -> None:
    for kind in MODELS:
        for precision in ("float32", "bfloat16"):
            print(json.dumps(measure(kind, precision)), flush=True)


if __name__ == "__main__":
    main()
