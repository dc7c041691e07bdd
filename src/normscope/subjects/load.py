"""`load`: a MODEL spec → a Subject."""

from pathlib import Path

import torch

from normscope.subjects.bare import make_subject
from normscope.subjects.feed import Portions
from normscope.subjects.hf import load_hf
from normscope.subjects.ours import load_ours
from normscope.subjects.python import call_factory
from normscope.subjects.rng import seeded
from normscope.subjects.spec import parse
from normscope.subjects.subject import Subject
from normscope.subjects.text import load_text


def load(
    spec: str,
    *,
    seed: int = 0,
    batch_size: int = 4,
    seq_len: int = 64,
    text: Path | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Subject:
    """Build what `spec` names and something to feed it.

    The global generators (torch, NumPy, random) start from `seed` before anything is built, and come back as they
    were. A factory of the user is run, as `python file.py` would; its prints go to stderr.

    Args:
        spec: MODEL: `nn:decoder,scheme=post`, `hf:gpt2,n_layer=24`, `hf:PATH`, `file.py:factory` or
            `package.module:factory`; option values are JSON.
        seed: of the weights and of the batches.
        batch_size, seq_len: sequences of a batch, and tokens of a sequence.
        text: a file of UTF-8 text; None is the Python standard library's source.
        device: where model and batches go.
        dtype: of the model's floating-point tensors; None leaves them as they are built.

    Raises:
        UsageError: for whatever cannot be used, on one line.
    """
    parsed = parse(spec)
    portions = Portions(batch_size, seq_len, seed)
    source = load_text(text)
    place = torch.device(device)
    with seeded(seed):
        if parsed.kind == "hf":
            return load_hf(parsed, portions, source, place, dtype)
        if parsed.kind == "nn":
            return load_ours(parsed, portions, source, place, dtype)
        model, batch, loss_fn = call_factory(parsed)
        model.to(place, dtype)
        return make_subject(
            model, batch, loss_fn, seed=seed, batch_size=batch_size, seq_len=seq_len, text=text, spec=spec
        )
