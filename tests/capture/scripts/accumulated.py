"""nanoGPT's loop, rebuilt: micro-batches, a rate by formula, clipping, a GradScaler, perhaps compiled."""

import sys

import torch
import torch.nn.functional as F
from parts import Decoder, batches, cross_entropy, say, tensors_with_decay

torch.manual_seed(0)
MICRO = 4
float16 = "--float16" in sys.argv
model = Decoder()
optimizer = torch.optim.AdamW(tensors_with_decay(model, 0.1), lr=1e-3, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, enabled=float16)
if "--compile" in sys.argv:
    model = torch.compile(model, backend="eager")
if "--compile-in-place" in sys.argv:
    model.compile(backend="eager")
data = batches()
for step in range(1, 100):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * (1 - step / 1000)
    total = 0.0
    micro_batches = MICRO - 2 if "--shorter" in sys.argv and step > 1 else MICRO
    for micro in range(micro_batches):
        inputs, targets = next(data)
        with torch.autocast("cpu", dtype=torch.float16, enabled=float16):
            logits = model(inputs)
            loss = cross_entropy(logits, targets)
            if "--items" in sys.argv:  # a share of the step, by the targets of all its batches
                summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
                loss = summed / (micro_batches * targets.numel())
        if "--overflow" in sys.argv and step == 3 and micro == 1:
            loss = loss * torch.tensor(float("inf"))
        shares = 1 if "--items" in sys.argv else MICRO
        total += loss.item() / shares
        scaler.scale(loss / shares).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    say(step, total)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
