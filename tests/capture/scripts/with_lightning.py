"""Lightning's Trainer.fit with automatic optimisation, as in its examples' Transformer."""

import lightning
import torch
from parts import Decoder, batches, cross_entropy, say
from torch.utils.data import DataLoader, TensorDataset


class LanguageModel(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.losses = Decoder(), []

    def training_step(self, batch, index):
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer):
        say(self.global_step + 1, sum(self.losses) / len(self.losses))
        self.losses = []

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


lightning.seed_everything(0)
trainer = lightning.Trainer(
    accelerator="cpu",
    max_steps=30,
    accumulate_grad_batches=2,
    gradient_clip_val=0.25,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
)
trainer.fit(LanguageModel(), DataLoader(TensorDataset(*next(batches(256))), batch_size=4))
