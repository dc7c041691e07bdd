"""Hugging Face's Trainer on a model from a config, with accumulation and a warm-up; `--bf16`."""

import sys
import tempfile

import torch
from parts import LENGTH, VOCABULARY, batches
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(0)
size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": LENGTH, "vocab_size": VOCABULARY}
model = GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
inputs, _ = next(batches(256))


class Says(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **more):
        if logs and "loss" in logs:
            print("loss of step", state.global_step, logs["loss"], flush=True)


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        max_grad_norm=0.5,
        max_steps=30,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        bf16="--bf16" in sys.argv,
    )
    rows = [{"input_ids": row, "labels": row} for row in inputs]
    Trainer(model, arguments, train_dataset=rows, callbacks=[Says()]).train()
