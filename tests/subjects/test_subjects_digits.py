"""The digits of scikit-learn."""

import itertools
import math
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normscope.errors import UsageError
from normscope.subjects import load
from normscope.subjects.digits import Images, load_images, resized

sklearn_datasets = pytest.importorskip("sklearn.datasets")

VISION = "nn:vision,depth=1,width=16,heads=2,image=16,patch=4,channels=1"


def test_they_are_the_digits_of_scikit_learn() -> None:
    given = sklearn_datasets.load_digits()
    images = load_images("digits")
    assert images.labels.tolist() == given.target.tolist()
    back = images.pixels * given.images.std() + given.images.mean()
    assert abs(back - given.images).max() < 1e-5
    assert images.pixels.mean() == pytest.approx(0, abs=1e-6)
    assert images.pixels.std() == pytest.approx(1, abs=1e-6)


def drawn(images: Images, batches: int = 200) -> set[bytes]:
    return {
        image.numpy().tobytes()
        for pixels, _ in itertools.islice(images.batches(32, 1), batches)
        for image in pixels
    }


def test_training_and_validation_share_no_image() -> None:
    images = load_images("digits", 0.1)
    assert images.held_out is not None
    assert images.held_out.end - images.held_out.begin == 179
    assert len(drawn(images)) > 1500
    assert drawn(images.held_out).isdisjoint(drawn(images))


def test_an_image_keeps_its_class() -> None:
    given = sklearn_datasets.load_digits()
    images = load_images("digits")
    table = {image.tobytes(): int(label) for image, label in zip(images.pixels, given.target, strict=True)}
    for pixels, labels in itertools.islice(images.batches(8, 0), 5):
        assert [table[image.numpy().tobytes()] for image in pixels] == labels.tolist()


@pytest.mark.parametrize("side", [4, 8, 12, 16, 224])
def test_resized(side: int) -> None:
    """Flat images stay flat, 8 × 8 stays as it is, and every channel is the same."""
    images = torch.randn(3, 8, 8)
    larger = resized(images, 3, side, side)
    assert larger.shape == (3, 3, side, side)
    assert torch.equal(larger[:, 0], larger[:, 2])
    assert torch.allclose(resized(torch.full((1, 8, 8), 0.7), 1, side, side), torch.tensor(0.7))
    if side == 8:
        assert torch.allclose(larger[:, 0], images)
    if side == 16:
        plain = F.interpolate(images[:, None], scale_factor=2, mode="bilinear")
        assert torch.allclose(larger[:, :1], plain, atol=1e-6)


def test_every_pixel_counts_where_an_image_is_made_smaller() -> None:
    """Halved: a pixel is the mean of four by the weights 1, 3, 3, 1 in each direction."""
    image = torch.zeros(1, 8, 8)
    image[0, 3, 3] = 1.0
    weights = torch.tensor([0, 3, 1, 0]) / 8
    assert torch.allclose(resized(image, 1, 4, 4)[0, 0], torch.outer(weights, weights))


def test_a_vision_model_of_ours() -> None:
    subject = load(VISION, images="digits", validation=0.1, batch_size=6)
    assert isinstance(subject.batch, dict)
    assert subject.batch["images"].shape == (6, 1, 16, 16)
    assert subject.input == (
        "1797 digits of scikit-learn, the last 10 % of them kept for validation, resized to (6, 1, 16, 16)"
    )
    assert subject.unigram_entropy == pytest.approx(math.log(10), abs=1e-3)  # of the classes
    assert subject.loss().item() == pytest.approx(math.log(10), abs=0.6)
    again = next(load(VISION, images="digits", validation=0.1, batch_size=6).batches())
    assert torch.equal(subject.batch["images"], again["images"])  # type: ignore[index, call-overload]
    assert subject.validation is not None
    other = load(VISION, images="digits", validation=0.1, batch_size=6, seed=4)
    assert other.validation is not None
    assert torch.equal(next(subject.validation())["images"], next(other.validation())["images"])  # type: ignore[index, call-overload]
    assert not torch.equal(subject.batch["images"], other.batch["images"])  # type: ignore[index, call-overload]


def test_the_digits_can_be_learnt() -> None:
    """A linear map of the pixels learns them, so images and labels of a batch belong together."""
    subject = load(
        "nn:vision,depth=1,width=8,heads=1,image=8,patch=4,channels=1", images="digits", batch_size=32
    )
    model = nn.Linear(64, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    losses = []
    for batch in itertools.islice(subject.batches(), 80):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["images"].flatten(1)), batch["labels"])  # type: ignore[index, call-overload]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert subject.unigram_entropy is not None
    assert sum(losses[-10:]) / 10 < subject.unigram_entropy - 1


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    from normscope.subjects import digits

    digits._digits.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        UsageError, match=r"scikit-learn to be installed; run pip install 'normscope\[vision\]'"
    ):
        load(VISION, images="digits")


def test_fake_tensors_take_them_too() -> None:
    subject = load(VISION, images="digits", fake=True)
    assert subject.batch["images"].shape == (4, 1, 16, 16)  # type: ignore[index, call-overload]
