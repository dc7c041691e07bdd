"""Predicted and measured peaks of training steps on a GPU, as they are and with a plan for 75 % of the peak.

    python -m benchmarks.gpu.plans

The measured peak is that of PyTorch's allocator in a second step. docs/plan.md has the results.
"""

import json

import torch

import normscope

MODELS = {
    "nn:decoder,depth=12,width=256": (8, 256),
    "nn:decoder,depth=6,width=512,scheme=post": (8, 256),
    "hf:llama,num_hidden_layers=6,hidden_size=512,intermediate_size=1376,num_attention_heads=8,"
    "num_key_value_heads=8": (8, 256),
    "hf:bert,num_hidden_layers=6": (8, 256),
}
"""Model → sequences and tokens in each."""


def measure(spec: str, batch_size: int, seq_len: int, limit: int | None) -> dict[str, object]:
    """Predicted and measured peak in bytes, and the number of modules that the plan recomputes."""
    subject = normscope.load(spec, device="cuda", batch_size=batch_size, seq_len=seq_len)
    plan = normscope.plan(subject, limit)
    plan.apply(subject.model)
    subject.model.train()
    optimizer = torch.optim.AdamW(subject.model.parameters(), 1e-4)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        subject.loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated()
    return {"model": spec, "modules": len(plan.recompute), "predicted": plan.peak, "measured": measured}


def main() -> None:
    for spec, (batch_size, seq_len) in MODELS.items():
        plain = measure(spec, batch_size, seq_len, None)
        print(json.dumps(plain), flush=True)
        limit = int(0.75 * int(str(plain["predicted"])))
        print(json.dumps(measure(spec, batch_size, seq_len, limit)), flush=True)


if __name__ == "__main__":
    main()
