"""Hugging Face model types, and the expected reading of each from its modelling code.

The labels were taken from the `forward` of the model's own file in transformers, never from our reader.
`hf_causal`, `hf_encoders`, `hf_seq2seq` and `hf_vision` write out their configurations; `hf_small_text`,
`hf_small_parts` and `hf_small_float` build theirs by the rule of `benchmarks.hf.small`.
"""

from hf_base import HFModel
from hf_causal import CAUSAL
from hf_encoders import ENCODERS
from hf_seq2seq import SEQ2SEQ
from hf_small_float import IMAGES, SOUNDS
from hf_small_parts import PARTS
from hf_small_text import DECODERS, PAIRS, READERS
from hf_vision import VISION

MODELS = [*CAUSAL, *ENCODERS, *SEQ2SEQ, *VISION, *DECODERS, *READERS, *PAIRS, *PARTS, *IMAGES, *SOUNDS]

__all__ = ["MODELS", "HFModel"]
