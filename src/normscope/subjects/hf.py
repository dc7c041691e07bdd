"""`hf:` specs → subjects."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from normscope.errors import UsageError, describe
from normscope.subjects.feed import Portions
from normscope.subjects.hf_config import hf_config, weights_folder
from normscope.subjects.hf_feed import hf_subject
from normscope.subjects.hf_heads import Head, heads_of
from normscope.subjects.spec import Spec
from normscope.subjects.subject import Subject
from normscope.subjects.text import Text


def load_hf(
    spec: Spec, portions: Portions, text: Text, device: torch.device, dtype: torch.dtype | None
) -> Subject:
    """The model that `spec` names with the first head that can be built and run."""
    with offline():
        config = hf_config(spec)
        refusals: list[UsageError] = []
        for head in heads_of(config):
            try:
                model = _build(spec, head, config).to(device, dtype)
                return hf_subject(model, head.kind, portions, text, spec.text)
            except UsageError as refusal:
                refusals.append(refusal)
    if refusals:
        raise refusals[0]
    raise UsageError(
        f'"{spec.text}" ({type(config).__name__})',
        "a text or vision model",
        "wrap it in a factory, file.py:factory",
    )


def _build(spec: Spec, head: Head, config: Any) -> Any:
    folder = weights_folder(spec)
    try:
        if folder is None:
            return head.auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
        return head.auto.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        ).train()
    except Exception as error:
        raise UsageError(
            f'"{spec.text}" ({describe(error)})', "a configuration that can be built", "change the options"
        ) from error


@contextmanager
def offline() -> Iterator[None]:
    """No network, and none of transformers' advice, inside."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
