"""Bare modules and factories: their inputs and losses."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.errors import UsageError
from normscope.subjects import load, make_subject
from normscope.subjects.loss import NextToken


class Model(nn.Module):
    """Embedding, positions, one layer of nn.TransformerEncoder, a head."""

    def __init__(
        self, *, vocab: int = 256, causal: bool = True, batch_first: bool = True, context: int = 64
    ) -> None:
        super().__init__()
        self.causal, self.batch_first = causal, batch_first
        self.positions = nn.Embedding(context, 16)  # stands first: it must not be taken for the vocabulary
        self.tokens = nn.Embedding(vocab, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        num_tokens = ids.shape[1] if self.batch_first else ids.shape[0]
        positions = self.positions(torch.arange(num_tokens, device=ids.device))
        x = self.tokens(ids) + (positions if self.batch_first else positions[:, None])
        mask = nn.Transformer.generate_square_subsequent_mask(num_tokens) if self.causal else None
        return self.head(self.layers(x, mask=mask))


class WithTargets(Model):
    """`forward(ids, targets=None)`, as in nanoGPT: without targets only the last token's logits."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        logits = super().forward(ids)
        if targets is None:
            return logits[:, -1:], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class WithLabels(Model):
    """`forward(ids, labels=None)`, as in transformers: the model shifts."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(ids)
        if labels is None:
            return {"logits": logits}
        return {
            "logits": logits,
            "loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
        }


def test_ids_and_next_token_loss() -> None:
    model = Model().eval()
    subject = make_subject(model)
    assert isinstance(subject.batch, Tensor)
    assert subject.batch.shape == (4, 64)
    assert subject.batch.dtype == torch.int64
    assert "byte ids, 4 sequences of 64 tokens" in subject.input
    expected = F.cross_entropy(model(subject.batch)[:, :-1].flatten(0, 1), subject.batch[:, 1:].flatten())
    assert subject.loss() == expected
    assert subject.unigram_entropy is not None
    assert subject.spec == "Model"


def test_a_small_vocabulary_is_found_and_gets_ranks() -> None:
    subject = make_subject(Model(vocab=40))
    assert isinstance(subject.batch, Tensor)
    assert subject.batch.max() < 40
    assert "by frequency" in subject.input
    assert isinstance(subject.loss_fn, NextToken)


class Positions(nn.Embedding):
    """Learnt positions in a parameter, whose size is not that of an embedding."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__(1, 1)
        self.table = nn.Parameter(torch.randn(1, context, width))

    def forward(self, positions: Tensor) -> Tensor:
        return self.table[0][positions]


@pytest.mark.parametrize(
    ("context", "asked", "is_table", "length"),
    [(50, 64, True, 50), (128, 4096, True, 128), (700, 4096, False, 512), (20, 64, False, 16)],
)
def test_the_longest_sequences_where_the_context_ends(
    context: int, asked: int, is_table: bool, length: int
) -> None:
    model = Model(context=context)
    if not is_table:
        model.positions = Positions(context, 16)
    subject = make_subject(model, seq_len=asked)
    assert isinstance(subject.batch, Tensor)
    assert subject.batch.shape == (4, length)
    assert f"4 sequences of {length} tokens (the model cannot take {asked})" in subject.input


def test_no_loss_where_later_tokens_are_seen() -> None:
    subject = make_subject(Model(causal=False))
    assert subject.loss_fn is None
    assert subject.unigram_entropy is None
    assert any("tokens see later ones" in note for note in subject.notes)


def test_no_loss_without_logits() -> None:
    subject = make_subject(nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 16)))
    assert subject.loss_fn is None
    assert any("neither a loss nor logits" in note for note in subject.notes)


def test_time_first_is_found() -> None:
    model = Model(batch_first=False).eval()
    subject = make_subject(model)
    assert isinstance(subject.batch, Tensor)
    assert subject.batch.shape == (64, 4)
    expected = F.cross_entropy(model(subject.batch)[:-1].flatten(0, 1), subject.batch[1:].flatten())
    assert subject.loss() == expected
    assert next(subject.batches()).shape == (64, 4)  # type: ignore[union-attr]
    assert any("time first" in note for note in subject.notes)


@pytest.mark.parametrize("kind", [WithTargets, WithLabels])
def test_a_models_own_loss_over_the_next_ids(kind: type[Model]) -> None:
    model = kind().eval()
    subject = make_subject(model)
    assert isinstance(subject.batch, dict)
    ids = subject.batch["ids"]
    assert ids.shape == (4, 64)
    logits = Model.forward(model, ids)
    if kind is WithTargets:
        assert torch.equal(subject.batch["targets"][:, :-1], ids[:, 1:])
        expected = F.cross_entropy(logits.flatten(0, 1), subject.batch["targets"].flatten())
    else:
        assert torch.equal(subject.batch["labels"], ids)
        expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(subject.loss(), expected)


def test_a_models_own_loss_is_not_used_where_it_sees_the_answer() -> None:
    assert make_subject(WithTargets(causal=False)).loss_fn is None


class WithAuxiliary(Model):
    """Logits and a load-balancing loss, which is not the loss of the batch."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(ids), torch.tensor(0.1)


def test_an_auxiliary_loss_is_not_the_loss() -> None:
    assert isinstance(make_subject(WithAuxiliary()).loss_fn, NextToken)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (4, 64, 16)),
        (nn.Sequential(nn.Linear(13, 16), nn.LayerNorm(16)), (4, 64, 13)),
        (nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 8)), (4, 64, 24)),
        (nn.Sequential(nn.Conv2d(1, 8, 4, 4), nn.Flatten(2), nn.Linear(49, 8)), (4, 1, 28, 28)),
    ],
)
def test_noise_where_floats_are_wanted(model: nn.Module, shape: tuple[int, ...]) -> None:
    subject = make_subject(model)
    assert isinstance(subject.batch, Tensor)
    assert subject.batch.shape == shape
    assert subject.batch.is_floating_point()
    assert "standard normal noise" in subject.input
    assert subject.loss_fn is None
    assert any("noise" in note for note in subject.notes)
    assert not torch.equal(*itertools.islice(subject.batches(), 2))  # type: ignore[arg-type]


class Patches(nn.Module):
    """A vision Transformer's entry: patches, a class token, learnt positions for 6 × 6 patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 10, 10)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(torch.zeros(1, 37, 8))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(x), 1, 8), x], dim=1) + self.positions


def test_the_side_of_images_from_the_positions() -> None:
    subject = make_subject(Patches())
    assert isinstance(subject.batch, Tensor)
    assert subject.batch.shape == (4, 3, 60, 60)


def test_two_inputs() -> None:
    subject = make_subject(nn.Transformer(16, 2, 1, 1, 32, batch_first=True))
    assert isinstance(subject.batch, tuple)
    assert [part.shape for part in subject.batch] == [(4, 64, 16), (4, 64, 16)]


def test_a_single_batch_is_repeated_and_said_so() -> None:
    ids = torch.randint(256, (2, 8))
    subject = make_subject(Model(), ids)
    assert "a single batch is repeated" in subject.notes
    assert all(torch.equal(batch, ids) for batch in itertools.islice(subject.batches(), 3))
    assert isinstance(subject.loss_fn, NextToken)


def test_an_iterator_is_replayed() -> None:
    def batches() -> Iterator[Tensor]:
        for index in range(3):
            yield torch.full((2, 8), index)

    subject = make_subject(Model(), batches())
    firsts = [int(batch[0, 0]) for batch in itertools.islice(subject.batches(), 7)]  # type: ignore[index]
    assert firsts == [0, 1, 2, 0, 1, 2, 0]
    assert [int(b[0, 0]) for b in itertools.islice(subject.batches(), 2)] == [0, 1]  # type: ignore[index]
    assert int(subject.batch[0, 0]) == 0  # type: ignore[index]
    assert "a single batch is repeated" not in subject.notes


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: (t,), lambda t: {"ids": t}, lambda t: [{"ids": t}]])
def test_batches_of_every_kind(wrap: object) -> None:
    ids = torch.randint(256, (2, 8))
    model = Model().eval()
    subject = make_subject(model, wrap(ids))  # type: ignore[operator]
    expected = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(subject.loss(), expected)


def test_a_loss_of_the_users() -> None:
    subject = make_subject(Model(causal=False), None, lambda output, batch: output.square().mean())
    assert subject.loss().ndim == 0


def test_a_loss_that_is_the_output() -> None:
    class Loss(Model):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids).square().mean()

    subject = make_subject(Loss(), torch.zeros(2, 8, dtype=torch.long))
    assert subject.loss().ndim == 0


def test_nan_is_no_mistake_of_the_users() -> None:
    model = Model()
    nn.init.constant_(model.head.weight, float("nan"))
    assert make_subject(model).loss_fn is not None


FACTORY = """
import random
import numpy as np
import torch
from dataclasses import dataclass
from torch import nn
import neighbour

@dataclass
class Config:
    width: int = 8

def make(width=8):
    print("hello from the factory")
    make.seen = (torch.rand(()).item(), np.random.rand(), random.random())
    config = Config(width)
    return nn.Sequential(nn.Embedding(256, config.width), nn.Linear(config.width, 256))

def large(width):
    return nn.Sequential(nn.Embedding(256, width), nn.Linear(width, 256))

def with_batch():
    return make(), torch.zeros(2, 3, dtype=torch.long)

def with_loss():
    return make(), (torch.zeros(2, 3, dtype=torch.long),), lambda output, batch: output.mean()
"""


@pytest.fixture
def factory(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("x = 1\n")
    path = tmp_path / "torch_like.py"
    path.write_text(FACTORY)
    return path


def test_a_factory(factory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subject = load(f"{factory}:make,width=12", seed=3)
    assert subject.model[0].weight.shape == (256, 12)  # type: ignore[index]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello from the factory" in captured.err
    assert subject.spec == f"{factory}:make,width=12"


def test_all_generators_are_seeded_before_the_factory(factory: Path) -> None:
    import sys

    seen = []
    for seed in (3, 3, 4):
        load(f"{factory}:make", seed=seed)
        seen.append(sys.modules["normscope_subject_torch_like"].make.seen)
    assert seen[0] == seen[1]
    assert all(a != b for a, b in zip(seen[0], seen[2], strict=True))


def test_factories_with_batch_and_loss(factory: Path) -> None:
    batch = load(f"{factory}:with_batch").batch
    assert isinstance(batch, Tensor)
    assert batch.shape == (2, 3)
    loss = load(f"{factory}:with_loss")
    torch.testing.assert_close(loss.loss(), loss.forward().mean())


def test_a_module_in_the_working_folder(
    factory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "models.py").write_text(FACTORY.replace("import neighbour\n", ""))
    monkeypatch.chdir(tmp_path)
    assert load("some_package.models:make").model[0].weight.shape == (256, 8)  # type: ignore[index]


def test_a_factory_in_fake_tensors(factory: Path) -> None:
    subject = load(f"{factory}:large,width=4000000", fake=True, dtype=torch.bfloat16)
    assert subject.model[0].weight.numel() == 256 * 4_000_000  # type: ignore[index, union-attr, operator]
    assert subject.model[0].weight.dtype == torch.bfloat16  # type: ignore[index]


@pytest.mark.parametrize("name", ["decoder", "encoder"])
def test_models_of_ours(name: str) -> None:
    subject = load(f"nn:{name},depth=1,width=16,heads=2,vocab=40", seq_len=24)
    assert isinstance(subject.batch, dict)
    ids, labels = subject.batch["ids"], subject.batch["labels"]
    assert ids.shape == labels.shape == (4, 24)
    if name == "decoder":
        assert torch.equal(ids[:, 1:], labels[:, :-1])
    else:
        assert torch.equal(labels != -100, ids == 39)
    assert subject.loss().item() == pytest.approx(3.7, abs=0.5)


def test_an_encoder_decoder_of_ours_goes_on_with_the_text() -> None:
    subject = load("nn:encoder-decoder,depth=1,width=16,heads=2,vocab=40", seq_len=24)
    assert isinstance(subject.batch, dict)
    ids, labels = subject.batch["ids"], subject.batch["labels"]
    assert ids.shape == labels.shape == (4, 24)
    assert ids.min() > 0  # 0 is what the decoder starts from
    assert "the decoder to go on with the text" in subject.input
    assert subject.loss().item() == pytest.approx(3.7, abs=0.5)


def test_vision_of_ours_sees_noise_and_the_report_says_so() -> None:
    subject = load("nn:vision,depth=1,width=16,heads=2,image=12,patch=4,channels=2,classes=5", batch_size=3)
    assert isinstance(subject.batch, dict)
    assert subject.batch["images"].shape == (3, 2, 12, 12)
    assert subject.input == "standard normal noise as images (3, 2, 12, 12), random labels"
    assert subject.unigram_entropy is None
    assert subject.loss().item() == pytest.approx(1.6, abs=0.5)
    again = next(subject.batches())
    assert torch.equal(subject.batch["images"], again["images"])  # type: ignore[index, call-overload]


@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder-decoder"])
def test_the_output_bias_of_ours_from_the_text(name: str) -> None:
    """The first loss is then that of the unigram frequencies."""
    subject = load(f"nn:{name},depth=1,width=16,heads=2,output_bias=unigram", batch_size=16)
    assert subject.unigram_entropy is not None
    assert subject.loss().item() == pytest.approx(subject.unigram_entropy, abs=0.2)


def test_images_have_no_unigram_frequencies() -> None:
    with pytest.raises(UsageError, match="a model of text"):
        load("nn:vision,depth=1,width=16,heads=2,output_bias=unigram")


def test_a_long_sequence_lengthens_the_context() -> None:
    subject = load("nn:decoder,depth=1,width=8,heads=1", seq_len=2000, batch_size=1)
    assert subject.batch["ids"].shape == (1, 2000)  # type: ignore[index, call-overload]


def test_one_token_has_no_next_one() -> None:
    subject = make_subject(Model(), torch.randint(0, 256, (2, 1)))
    assert subject.loss_fn is None
    assert "a sequence of one token has no next token" in " ".join(subject.notes)


class LastLogits(nn.Module):
    """A language model that gives every logit only beside its loss, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.head(self.table(idx))
        if targets is None:
            return logits[:, [-1]], None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    "wrap", [nn.Identity, nn.DataParallel, lambda model: torch.compile(model, backend="eager")]
)
def test_labels_are_found_through_wrappers(wrap) -> None:
    model = LastLogits() if wrap is nn.Identity else wrap(LastLogits())
    subject = make_subject(model)
    assert "the next ids as targets" in subject.input
    assert subject.loss_fn is not None


class MaskAdded(Model):
    """`forward(src, src_mask)` of PyTorch's tutorial: the mask (T, T) is added to the scores."""

    def forward(self, src: Tensor, src_mask: Tensor) -> Tensor:  # type: ignore[override]
        return self.head(self.layers(self.tokens(src), mask=src_mask))


class MaskTrue(nn.Module):
    """`forward(x, mask)` of the Annotated Transformer: the mask is true where a token may look."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.query, self.head = nn.Embedding(256, 16), nn.Linear(16, 16), nn.Linear(16, 256)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.table(x)
        scores = (self.query(x) @ x.mT).masked_fill(mask == 0, -1e9)
        return self.head(x + scores.softmax(-1) @ x)


class MaskOfPadding(Model):
    """`forward(input_ids, attention_mask)`: causal by itself, the mask (B, T) is 1 at every token."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1])
        padded = torch.zeros(attention_mask.shape).masked_fill(attention_mask == 0, float("-inf"))
        return self.head(self.layers(self.tokens(input_ids), mask=mask, src_key_padding_mask=padded))


@pytest.mark.parametrize(
    ("model", "ids", "masks", "words"),
    [
        (MaskAdded(), (4, 64), (64, 64), "src_mask: a causal mask that is added"),
        (MaskAdded(batch_first=False), (64, 4), (64, 64), "src_mask: a causal mask that is added"),
        (MaskTrue(), (4, 64), (64, 64), "mask: a causal mask that is true"),
        (MaskOfPadding(), (4, 64), (4, 64), "attention_mask: ones"),
    ],
    ids=["added", "added, time first", "true", "of padding"],
)
def test_a_required_mask_makes_the_model_causal(
    model: nn.Module, ids: tuple[int, int], masks: tuple[int, int], words: str
) -> None:
    subject = make_subject(model)
    assert [tuple(part.shape) for part in subject.batch] == [ids, masks]
    assert words in subject.input
    assert isinstance(subject.loss_fn, NextToken)
    assert subject.loss().isfinite()


def test_the_error_names_the_arguments_that_could_not_be_made() -> None:
    class Two(Model):
        def forward(self, src: Tensor, tgt: Tensor, tgt_mask: Tensor) -> Tensor:  # type: ignore[override]
            return self.layers(self.tokens(src), mask=tgt_mask)

    with pytest.raises(UsageError, match=r"with the batch \(src, tgt, tgt_mask\)"):
        make_subject(Two())


def test_time_comes_first_also_where_there_are_as_many_sequences_as_tokens() -> None:
    subject = make_subject(MaskAdded(batch_first=False), batch_size=16, seq_len=16)
    assert any("time first" in note for note in subject.notes)
    assert not any(
        "time first" in note for note in make_subject(MaskAdded(), batch_size=16, seq_len=16).notes
    )
