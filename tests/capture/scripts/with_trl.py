"""TRL's SFTTrainer on tokens; `--dpo` its DPOTrainer, which runs the model more than once for a loss."""

import copy
import sys
import tempfile

import torch
from datasets import Dataset
from parts import LENGTH, VOCABULARY, batches
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

torch.manual_seed(0)
words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2", unk_token="0")
size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 2 * LENGTH, "vocab_size": VOCABULARY}
model = GPT2LMHeadModel(GPT2Config(**size, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
texts = [" ".join(map(str, row)) for row in next(batches(64))[0].tolist()]


class Says(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **more):
        if logs and "loss" in logs:
            print("loss of step", state.global_step, logs["loss"], flush=True)


def arguments(kind, folder, **more):
    return kind(
        output_dir=folder,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_steps=12,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **more,
    )


with tempfile.TemporaryDirectory() as folder:
    if "--dpo" in sys.argv:
        pairs = {"prompt": texts[:32], "chosen": texts[32:], "rejected": texts[31::-1]}
        trainer = DPOTrainer(
            model,
            ref_model=copy.deepcopy(model),
            args=arguments(DPOConfig, folder, max_length=2 * LENGTH),
            train_dataset=Dataset.from_dict(pairs),
            processing_class=tokenizer,
            callbacks=[Says()],
        )
    else:
        trainer = SFTTrainer(
            model,
            args=arguments(SFTConfig, folder, max_length=LENGTH),
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer,
            callbacks=[Says()],
        )
    trainer.train()
