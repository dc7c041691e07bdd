"""Building blocks and models: norms, schemes, attention, feed-forward, decoders, encoders."""

from normscope.nn.attention import Attention
from normscope.nn.block import Block
from normscope.nn.config import ModelConfig
from normscope.nn.context import Cache, Context
from normscope.nn.encoder_decoder import EncoderDecoder
from normscope.nn.feed_forward import FeedForward
from normscope.nn.head import set_output_bias
from normscope.nn.joins import Join, Scaled
from normscope.nn.language_model import Decoder, Encoder
from normscope.nn.models import MODELS, build
from normscope.nn.norms import NORMS
from normscope.nn.output import Output
from normscope.nn.placement import Placement, Slot, Where, norms_at
from normscope.nn.rates import block_matrices, has_own_rates, param_groups
from normscope.nn.residual import Residual
from normscope.nn.save import load_model, save_model
from normscope.nn.scheme import Initialisation, Inside, Scheme
from normscope.nn.schemes import SCHEMES, scheme_named
from normscope.nn.schemes.admin import profile_admin
from normscope.nn.swap import SwapWarning, swap
from normscope.nn.vision import Vision
from normscope.nn.weights import WEIGHTS

__all__ = [
    "MODELS",
    "NORMS",
    "SCHEMES",
    "WEIGHTS",
    "Attention",
    "Block",
    "Cache",
    "Context",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "FeedForward",
    "Initialisation",
    "Inside",
    "Join",
    "ModelConfig",
    "Output",
    "Placement",
    "Residual",
    "Scaled",
    "Scheme",
    "Slot",
    "SwapWarning",
    "Vision",
    "Where",
    "block_matrices",
    "build",
    "has_own_rates",
    "load_model",
    "norms_at",
    "param_groups",
    "profile_admin",
    "save_model",
    "scheme_named",
    "set_output_bias",
    "swap",
]
