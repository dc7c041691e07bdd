"""Shapes of image and sound inputs, from the configurations of transformers' models."""

from typing import Any

from normscope.subjects.feed import Portions

FLOAT_INPUTS = ("pixel_values", "pixel_values_videos", "input_features", "input_values")
_IMAGE, _CHANNELS, _SAMPLES, _FRAMES = 224, 3, 16_000, 16

_MEL_NAMES = ("num_mel_bins", "input_feat_per_channel", "feature_size", "num_features")

Shape = tuple[int, ...]


def float_shapes(name: str, config: Any, portions: Portions) -> list[Shape]:
    """Candidate shapes for the input `name`, the likeliest first."""
    batch = portions.batch_size
    if name.startswith("pixel_values"):
        return _images(config, batch)
    if name == "input_features":
        return _features(config, portions)
    mels = getattr(config, "num_mel_bins", None)
    spectrogram = [(batch, getattr(config, "max_length", 1024), mels)] if isinstance(mels, int) else []
    return [*spectrogram, (batch, _SAMPLES), (batch, 1, _SAMPLES)]


def _images(config: Any, batch: int) -> list[Shape]:
    vision = getattr(config, "vision_config", config)
    channels = _first_int(vision, ("num_channels", "in_channels", "in_chans"), _CHANNELS)
    height, width = _pair(getattr(vision, "image_size", None) or getattr(vision, "img_size", None) or _IMAGE)
    image = (batch, channels, height, width)
    frames = _first_int(vision, ("num_frames", "frames_per_clip"), _FRAMES)
    video = (batch, frames, channels, height, width)
    other = [(batch, channels, side, side) for side in (_IMAGE, 384, 64) if side not in (height, width)]
    return [video, image] if hasattr(vision, "num_frames") else [image, *other, video]


def _features(config: Any, portions: Portions) -> list[Shape]:
    batch, length = portions.batch_size, portions.seq_len
    mels = _first_int(config, _MEL_NAMES, 80)
    positions = _first_int(config, ("max_source_positions",), 1500)
    # Whisper takes two frames per position, features first; the others take features last.
    return [(batch, mels, 2 * positions), (batch, 4 * length, mels), (batch, 4 * length, 160)]


def _first_int(config: Any, names: tuple[str, ...], otherwise: int) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), otherwise)


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict):
        size = [size.get("height", _IMAGE), size.get("width", _IMAGE)]
    if isinstance(size, list | tuple) and size:
        return int(size[0]), int(size[-1])
    return (size, size) if isinstance(size, int) else (_IMAGE, _IMAGE)
