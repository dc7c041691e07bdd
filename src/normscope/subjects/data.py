"""Data for a model: a text, pairs of lines, or images."""

from dataclasses import dataclass
from pathlib import Path

from normscope.errors import UsageError
from normscope.subjects.digits import Images, load_images
from normscope.subjects.parallel import Pairs
from normscope.subjects.text import Text, load_text

ENCODER_DECODERS = "an encoder-decoder of text for --source and --target"
CLASSIFIERS = "a model of images with classes for --images"


@dataclass(frozen=True, eq=False)
class Data:
    """A text, or the pairs or images that replace it.

    Attributes:
        text: the user's text, else the standard library's source.
        pairs: parallel texts; only for encoder–decoders.
        images: real images; only for vision models.
        tokens: folder for the tokens of the whole text, for models with a tokenizer; None tokenises only the
            first part of the text, in memory.
    """

    text: Text
    pairs: Pairs | None = None
    images: Images | None = None
    tokens: Path | None = None


def gather(
    text: Path | None = None,
    source: Path | None = None,
    target: Path | None = None,
    images: str | None = None,
    validation: float = 0.0,
    tokens: Path | None = None,
) -> Data:
    """The data that these options of `load` name.

    Raises:
        UsageError: only one of two parallel texts is given, options exclude one another, or data cannot be
            used.
    """
    if (source is None) != (target is None):
        raise UsageError(
            f'--source "{source}" alone' if target is None else f'--target "{target}" alone',
            "two texts, line by line",
            f"give --{'target' if target is None else 'source'} too",
        )
    kinds = {"--text": text, "--source and --target": source, "--images": images}
    given = [name for name, value in kinds.items() if value is not None]
    if len(given) > 1:
        raise UsageError(" together with ".join(given), "one of them", "leave the others out")
    pairs = None
    if source is not None and target is not None:
        pairs = Pairs.of(_lines("source", source, validation), _lines("target", target, validation))
    pictures = None if images is None else load_images(images, validation)
    return Data(load_text(text, validation), pairs, pictures, tokens)


def _lines(option: str, path: Path, validation: float) -> Text:
    """Load a text from one file: at the border of two files of a folder, two lines could become one."""
    text = load_text(path, validation)
    if Path(path).is_dir():
        raise UsageError(f'--{option} "{path}" (a folder)', "one file of lines", "put its files into one")
    return text
