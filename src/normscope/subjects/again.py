"""`build_again`: the model of a loaded MODEL with fresh weights, without batches and without a forward."""

import torch
from torch import nn

from normscope.nn import MODELS, ModelConfig, load_model
from normscope.subjects.fake import moved
from normscope.subjects.hf import offline
from normscope.subjects.hf_config import configured
from normscope.subjects.hf_heads import heads_of
from normscope.subjects.memory import memory_refusals
from normscope.subjects.python import call_factory
from normscope.subjects.rng import seeded
from normscope.subjects.spec import parse


def build_again(
    spec: str,
    like: nn.Module,
    seed: int,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The model of `spec` as `load` builds it from `seed`; weights from files are the same at every seed.

    Args:
        spec: a MODEL that `load` took.
        like: the module that it gave, of which the kind and the head are known.
        seed: seed of the weights.
        device, dtype: as for `load`.

    Raises:
        UsageError: the model does not fit into memory, or the user's factory fails.
    """
    parsed = parse(spec)
    with memory_refusals(f'model "{spec}"'), seeded(seed):
        if parsed.kind == "python":
            model = call_factory(parsed)[0]
        elif parsed.kind == "hf":
            model = _of_transformers(spec, like)
        elif parsed.name in MODELS:
            assert isinstance(like.config, ModelConfig)
            model = MODELS[parsed.name](like.config)
            if parsed.options.get("output_bias") == "unigram":  # from the text, which no seed changes
                to, of = model.get_parameter("head.bias"), like.get_parameter("head.bias")
                to.data.copy_(of.data)
        else:
            model = load_model(parsed.name)
        return moved(model, torch.device(device), dtype)


def _of_transformers(spec: str, like: nn.Module) -> nn.Module:
    with offline():
        made = configured(parse(spec))
        for head in heads_of(made.config):
            classes = head.auto._model_mapping[type(made.config)]
            if type(like) in (classes if isinstance(classes, tuple | list) else (classes,)):
                if made.folder is None:
                    model: nn.Module = head.build(made.config)
                    return model
                return (
                    type(like)
                    .from_pretrained(  # type: ignore[attr-defined]
                        made.folder,
                        config=made.config,
                        dtype=torch.float32,
                        local_files_only=True,
                        use_safetensors=True,
                    )
                    .train()
                )
    raise AssertionError(f"{spec} has no head of {type(like).__name__}")
