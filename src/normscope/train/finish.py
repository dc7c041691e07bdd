"""Output of a finished run: the trained model on disk, and a text sample from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from normscope.atomic import disk_refusals, write_folder
from normscope.errors import describe
from normscope.nn import MODELS, Decoder, save_model
from normscope.nn.generate import resting
from normscope.nn.tensors import tensors_of
from normscope.subjects import Subject
from normscope.subjects.hf import offline
from normscope.subjects.rng import generators_kept
from normscope.train.folder import GO_ON
from normscope.train.run import Run
from normscope.train.state import whole

PROMPT, NEW = 24, 120
"""Numbers of tokens of a sample: in the prompt, and generated."""

TEMPERATURE = 0.8


def whole_model(run: Run) -> nn.Module | None:
    """The whole trained model, in the first process; None in the others. Every process must call this."""
    model = run.trial.bare_model
    if not any(hasattr(tensor, "full_tensor") for tensor in tensors_of(model).values()):
        return model if run.processes.is_first else None
    first = run.processes.is_first
    tensors = {name: whole(tensor, first) for name, tensor in tensors_of(model).items()}
    if not first:
        return None
    twin = run.config.subject("cpu").model
    with torch.no_grad():
        for name, tensor in tensors_of(twin).items():
            tensor.copy_(tensors[name])
    return twin


def write_model(model: nn.Module, folder: Path) -> None:
    """Write a model of nn: or hf: in the form that `load` reads; of any other model write the tensors.

    Raises:
        UsageError: the folder cannot be written.
    """
    with disk_refusals(f'folder "{folder}"', GO_ON):
        if type(model) in MODELS.values():
            save_model(model, folder)  # type: ignore[arg-type]
        elif hasattr(model, "save_pretrained"):
            with offline():  # silences its progress bar
                write_folder(folder, cast(Any, model).save_pretrained)
        else:
            tensors = {name: whole(tensor) for name, tensor in tensors_of(model).items()}
            write_folder(folder, lambda path: save_file(tensors, path / "model.safetensors"))


@dataclass(frozen=True)
class Sample:
    """A prompt and the model's continuation, or the reason of a failure: diverged models draw from nan."""

    prompt: str
    text: str
    failure: str | None = None


def sample(model: nn.Module, subject: Subject, seed: int = 0) -> Sample | None:
    """A prompt from the text and its continuation by `model`; None for a model that generates no bytes."""
    batch = next((subject.validation or subject.batches)())
    ids = batch.get("ids", batch.get("input_ids")) if isinstance(batch, Mapping) else None
    is_of_bytes = "byte ids" in subject.input and "byte ids by frequency" not in subject.input
    if not (isinstance(ids, Tensor) and ids.ndim == 2 and is_of_bytes):
        return None
    prompt = ids[:1, :PROMPT].to(next(model.parameters()).device)
    try:
        with torch.no_grad(), generators_kept(), resting(model):
            torch.manual_seed(seed)
            written = _written(model, prompt)
    except Exception as error:  # the model is saved already: still show the summary
        return Sample(_text(prompt[0]), "", describe(error))
    return None if written is None else Sample(_text(prompt[0]), _text(written[0, prompt.shape[1] :]))


def _written(model: Any, prompt: Tensor) -> Tensor | None:
    """(1, T) → (1, T + new); None if `model` cannot generate, or its context is too short."""
    if isinstance(model, Decoder):
        new = min(NEW, model.config.context - prompt.shape[1])
        return model.generate(prompt, new, temperature=TEMPERATURE) if new > 0 else None
    can_generate = getattr(model, "can_generate", None)  # a method of Hugging Face's models
    if not callable(can_generate) or not can_generate() or model.config.is_encoder_decoder:
        return None
    room = getattr(model.config, "max_position_embeddings", None) or NEW + PROMPT
    new = min(NEW, room - prompt.shape[1])
    if new <= 0:
        return None
    options = {"do_sample": True, "temperature": TEMPERATURE, "pad_token_id": 0, "max_new_tokens": new}
    with offline():
        return model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)


def _text(ids: Tensor) -> str:
    """Decode bytes as UTF-8; invalid bytes and ids over 255 become �."""
    return bytes(b if b < 256 else 0xFF for b in ids.tolist()).decode("utf-8", errors="replace")
