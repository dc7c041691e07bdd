"""Heads of transformers for a configuration, in the order in which they are tried."""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch

HeadKind = Literal["causal", "seq2seq", "masked", "image-classification", "base"]


@dataclass(frozen=True)
class Head:
    """A head and the auto class that builds it."""

    kind: HeadKind
    auto: Any

    def build(self, config: Any) -> Any:
        """The model with random weights in float32, in train mode."""
        classes = self.auto._model_mapping[type(config)]
        if isinstance(classes, tuple | list) and not getattr(config, "architectures", None):
            config.architectures = [classes[0].__name__]  # transformers needs one name among several classes
        return self.auto.from_config(config, dtype=torch.float32, trust_remote_code=False).train()


def heads_of(config: Any) -> list[Head]:
    """The heads that `config` can have: causal, seq2seq, masked, image classification, base.

    Types with several heads, such as BERT and BART, get their main one: seq2seq for an encoder-decoder,
    masked unless `is_decoder` is set.
    """
    import transformers as hf

    candidates = [
        Head("causal", hf.AutoModelForCausalLM),
        Head("seq2seq", hf.AutoModelForSeq2SeqLM),
        Head("seq2seq", hf.AutoModelForSpeechSeq2Seq),
        Head("masked", hf.AutoModelForMaskedLM),
        Head("image-classification", hf.AutoModelForImageClassification),
        Head("base", hf.AutoModel),
    ]
    heads = [head for head in candidates if type(config) in head.auto._model_mapping]
    kinds = {head.kind for head in heads}
    if getattr(config, "is_encoder_decoder", False) and "seq2seq" in kinds:
        return [head for head in heads if head.kind in ("seq2seq", "base")]
    if {"causal", "masked"} <= kinds and not getattr(config, "is_decoder", False):
        return sorted(heads, key=lambda head: head.kind == "causal")
    return heads


def head_kind_of(model: Any) -> HeadKind:
    """The head of a model that is already built, by its class."""
    from transformers.models.auto import modeling_auto as auto

    name = type(model).__name__
    tables: dict[HeadKind, tuple[Any, ...]] = {
        "seq2seq": (
            auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        ),
        "masked": (auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,),
        "causal": (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,),
        "image-classification": (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,),
    }
    for kind, mappings in tables.items():
        for classes in itertools.chain.from_iterable(mapping.values() for mapping in mappings):
            if name in (classes if isinstance(classes, tuple | list) else (classes,)):
                return kind
    return "base"
