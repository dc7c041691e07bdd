"""Subjects of `hf:` specs, without network access, remote code or pickles."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
    unset_fake_temporarily,
)

from normscope.errors import UsageError, describe
from normscope.subjects.assemble import AttemptError
from normscope.subjects.data import Data
from normscope.subjects.fake import fake_from_meta, moved
from normscope.subjects.feed import Portions
from normscope.subjects.hf_config import Configured, configured
from normscope.subjects.hf_feed import feeder_of, hf_subject
from normscope.subjects.hf_heads import Head, heads_of
from normscope.subjects.memory import is_out_of_memory, memory_refusals, require_room_for_model
from normscope.subjects.rng import seeded
from normscope.subjects.spec import Spec
from normscope.subjects.subject import Subject


def load_hf(
    spec: Spec, portions: Portions, data: Data, device: torch.device, dtype: torch.dtype | None, fake: bool
) -> Subject:
    """Load the model of `spec` with the first head that can be built and run."""
    with offline():
        made = configured(spec)
        refusals: list[UsageError] = []
        for head in heads_of(made.config):
            try:
                with seeded(portions.seed):
                    model, notes = _build(spec, head, made, device, fake)
                    feeder = feeder_of(moved(model, device, dtype), head.kind, portions, data, made.folder)
                    return hf_subject(feeder, spec.text, (*made.notes, *notes))
            except AttemptError as refusal:
                refusals.append(refusal)
    if refusals:
        raise refusals[0]
    raise UsageError(
        f'"{spec.text}" ({type(made.config).__name__})',
        "a text, vision or speech model that transformers can build from its config",
        "wrap it in a factory, file.py:factory",
    )


Built = tuple[Any, tuple[str, ...]]
"""A model in train mode, and notes about it."""


def _build(spec: Spec, head: Head, made: Configured, device: torch.device, fake: bool) -> Built:
    given = f'model "{spec.text}"'
    try:
        with memory_refusals(given):
            if fake:
                return _fake(head, made.config), ()
            _require_room(head, made.config, given, device)
            if made.folder is None:
                return head.build(made.config), ()
            return _with_weights(head, made.config, made.folder, given)
    except UsageError:
        raise
    except Exception as error:
        raise AttemptError(
            f"{given} ({describe(error)})",
            f"values from which {type(made.config).__name__} can build a model",
            "change the options",
        ) from error


def _fake(head: Head, config: Any) -> Any:
    """Build the model in fake tensors; a model whose construction needs values is built on meta first."""
    try:
        return head.build(config)
    except DataDependentOutputException:
        with unset_fake_temporarily() as mode, torch.device("meta"):
            model = head.build(config)
        assert isinstance(mode, FakeTensorMode), "called inside a fake mode"
        return fake_from_meta(model, mode)


def _with_weights(head: Head, config: Any, folder: Path, given: str) -> Built:
    model, report = head.auto.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    missing = len(report["missing_keys"])
    if missing and missing >= len(model.state_dict()):
        raise UsageError(
            f'{given} (no weight of "{folder}" has a name of {type(model).__name__})',
            "weights of this model",
            "check that config.json and model.safetensors belong together",
        )
    notes = (f"{missing} tensors are not in the file and start at random",) if missing else ()
    return model.train(), notes


def _require_room(head: Head, config: Any, given: str, device: torch.device) -> None:
    """Raise UsageError if the model needs too much memory; it is built on the meta device to count."""
    try:
        with torch.device("meta"):
            model = head.build(config)
    except Exception as error:  # the real build, which comes next, gives the same error or needs real tensors
        if is_out_of_memory(error):
            raise
        return
    require_room_for_model(model.parameters(), given, device)


@contextmanager
def offline() -> Iterator[None]:
    """Block network access and silence transformers' advice during the block."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it on import, so it stays for the process
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise UsageError(
            "a model of Hugging Face", "transformers to be installed", "run pip install 'normscope[hf]'"
        ) from error
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
