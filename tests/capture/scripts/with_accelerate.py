"""The loop of Accelerate's examples, rebuilt: prepare, accumulate, backward, clip_grad_norm_."""

import torch
from accelerate import Accelerator
from parts import Decoder, batches, cross_entropy, say
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
MICRO = 2
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.01 * step))
loader = DataLoader(TensorDataset(*next(batches(256))), batch_size=4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
step, losses = 1, []
for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = cross_entropy(model(inputs), targets)
        losses.append(accelerator.gather(loss.detach()).mean().item())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if accelerator.is_main_process:
                say(step, sum(losses) / len(losses))
            step, losses = step + 1, []
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
