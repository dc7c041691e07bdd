"""`hf:` specs: heads, inputs, losses, options, weights."""

import json
import math
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from normscope.errors import UsageError  # noqa: E402
from normscope.subjects import Subject, fake_mode_of, load, make_subject, untouched  # noqa: E402

BERT = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
LLAMA = f"{BERT},num_key_value_heads=2"
GPT2 = "hf:gpt2,n_layer=1,n_embd=16,n_head=2"
BART = "d_model=16,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2"
XLNET = "hf:xlnet,d_model=16,n_layer=1,n_head=2,d_inner=16"
T5 = "hf:t5,d_model=16,d_kv=8,num_heads=2,d_ff=16,num_layers=1"
VIT = f"hf:vit,{BERT},image_size=32,patch_size=8"

MODELS = [
    (GPT2, "GPT2LMHeadModel", "next-token loss", ("input_ids", "labels")),
    (f"hf:llama,{LLAMA}", "LlamaForCausalLM", "next-token loss", ("input_ids", "labels")),
    (f"hf:bert,{BERT}", "BertForMaskedLM", "15 % masked", ("input_ids", "labels")),
    (f"hf:bert,{BERT},is_decoder=true", "BertLMHeadModel", "next-token loss", ("input_ids", "labels")),
    (f"hf:bert-generation,{BERT}", "BertGenerationDecoder", "next-token loss", ("input_ids", "labels")),
    (f"hf:modernbert,{BERT}", "ModernBertForMaskedLM", "15 % masked", ("input_ids", "labels")),
    (XLNET, "XLNetLMHeadModel", "15 % masked", ("input_ids", "labels")),
    (T5, "T5ForConditionalGeneration", "the decoder to go on", ("input_ids", "labels")),
    (f"hf:bart,{BART}", "BartForConditionalGeneration", "the decoder to go on", ("input_ids", "labels")),
    (
        f"hf:whisper,{BART},num_mel_bins=8,max_source_positions=20",
        "WhisperForConditionalGeneration",
        "input_features (4, 8, 40)",
        ("input_features", "labels"),
    ),
    (VIT, "ViTForImageClassification", "pixel_values (4, 3, 32, 32), random labels", ("labels",)),
    (VIT.replace("vit", "deit"), "DeiTForImageClassification", "random labels", ("pixel_values",)),
]


TROCR = "hf:trocr,d_model=16,decoder_layers=1,decoder_attention_heads=2,decoder_ffn_dim=16"


def test_labels_are_the_next_ids_also_where_the_model_does_not_shift_them() -> None:
    for spec, shifts in ((GPT2, True), (TROCR, False)):
        subject = load(spec)
        assert isinstance(subject.batch, dict)
        ids, labels = subject.batch["input_ids"], subject.batch["labels"]
        assert ids.shape == labels.shape == (4, 64)
        assert torch.equal(ids, labels) == shifts
        assert torch.equal(ids[:, 1:], labels[:, :-1]) == (not shifts)
        assert "next-token loss" in subject.input


def test_a_text_beside_images_ends_as_the_model_expects() -> None:
    """CLIP reads its text at the end token; without one it reads the first token, which has seen no other."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = json.dumps(small | {"image_size": 32, "patch_size": 8})
    for end in (7, 9):
        text = json.dumps(small | {"vocab_size": 260, "eos_token_id": end})
        batch = load(f"hf:clipseg,text_config={text},vision_config={vision}").batch
        assert isinstance(batch, dict)
        assert (batch["input_ids"][:, -1] == end).all()


@pytest.mark.parametrize(("spec", "name", "words", "keys"), MODELS, ids=[m[1] for m in MODELS])
def test_heads_inputs_and_losses(spec: str, name: str, words: str, keys: tuple[str, ...]) -> None:
    subject = load(spec)
    assert type(subject.model).__name__ == name
    assert words in subject.input
    assert isinstance(subject.batch, dict)
    assert set(keys) <= set(subject.batch)
    assert subject.model.training
    subject.model.eval()
    loss = subject.loss()
    assert loss.shape == ()
    loss.backward()
    assert math.isfinite(loss.item())
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in subject.model.parameters())
    text = "pixel_values" not in subject.batch
    assert (subject.unigram_entropy is not None) == text


def test_the_unigram_entropy_is_that_of_the_text() -> None:
    subject = load(GPT2)
    assert 2.5 < subject.unigram_entropy < 4.0  # Python source


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (f"hf:clip_text_model,{BERT}", "no head"),
        (f"hf:clip_vision_model,{BERT},image_size=32,patch_size=8", "no head"),
    ],
)
def test_a_model_without_head_has_no_loss(spec: str, words: str) -> None:
    subject = load(spec)
    assert subject.loss_fn is None
    assert any(words in note for note in subject.notes)
    with untouched(subject.model):
        subject.forward()


def test_the_text_part_of_a_composite() -> None:
    subject = load(f"hf:gemma3,{LLAMA},head_dim=8,vocab_size=300")
    assert type(subject.model).__name__ == "Gemma3ForCausalLM"
    assert subject.model.config.num_hidden_layers == 1
    assert any("text part (gemma3_text)" in note for note in subject.notes)
    nested = load(
        'hf:gemma3,text_config={"hidden_size":16,"num_hidden_layers":2,"intermediate_size":16,"vocab_size":300}'
    )
    assert nested.model.config.num_hidden_layers == 2


def test_an_option_that_only_the_model_reads() -> None:
    subject = load(f"hf:qwen2,{LLAMA},head_dim=4")
    assert subject.model.model.layers[0].self_attn.q_proj.weight.shape == (8, 16)


@pytest.mark.parametrize("lacking", ["decoder_start_token_id", "pad_token_id"])
@pytest.mark.parametrize("in_pairs", [False, True], ids=["text", "pairs"])
def test_a_decoder_without_a_start_or_a_pad_starts_with_0(
    lacking: str, in_pairs: bool, tmp_path: Path
) -> None:
    (tmp_path / "source").write_text("one two three\nfour\n" * 20)
    (tmp_path / "target").write_text("uno\nquattro\n" * 20)
    pairs = {"source": tmp_path / "source", "target": tmp_path / "target"} if in_pairs else {}
    whole, subject = (
        load(f"{T5},vocab_size=300", **pairs),
        load(f"{T5},vocab_size=300,{lacking}=null", **pairs),
    )
    assert f"the config has no {lacking}: the decoder starts with id 0" in subject.notes
    inputs = subject.batch["decoder_input_ids"]
    assert torch.equal(inputs, whole.model._shift_right(whole.batch["labels"]))
    assert (inputs >= 0).all()
    with torch.no_grad():
        assert torch.equal(subject.model.eval()(**subject.batch).loss, whole.model.eval()(**whole.batch).loss)


def test_a_config_from_code_lacks_the_start_of_its_decoder() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=16, d_kv=8, num_heads=2, d_ff=16, num_layers=1, vocab_size=300)
    subject = make_subject(T5ForConditionalGeneration(config), seq_len=16)
    assert subject.loss().isfinite()
    assert not hasattr(config, "decoder_start_token_id"), "the model stays as it is"


def test_an_option_that_only_the_code_of_the_configuration_reads() -> None:
    """An older name of ModernBERT. Code of Llama has the word "layers" too, not as an option."""
    spec = f"hf:modernbert,{BERT},vocab_size=300,pad_token_id=0,global_attn_every_n_layers=1"
    assert load(spec).model.config.layer_types == ["full_attention"]


def test_seed_and_batches() -> None:
    first, same, other = load(GPT2, seed=1), load(GPT2, seed=1), load(GPT2, seed=2)
    assert torch.equal(first.model.lm_head.weight, same.model.lm_head.weight)
    assert not torch.equal(first.model.lm_head.weight, other.model.lm_head.weight)
    assert torch.equal(_ids(first), _ids(same))
    assert not torch.equal(_ids(first), _ids(other))
    batches = first.batches()
    assert torch.equal(next(batches)["input_ids"], _ids(first))
    assert not torch.equal(next(batches)["input_ids"], _ids(first))
    assert torch.equal(next(first.batches())["input_ids"], _ids(first))


def _ids(subject: Subject) -> torch.Tensor:
    assert isinstance(subject.batch, dict)
    return subject.batch["input_ids"]


def test_sizes_dtype_and_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abcd" * 100)
    subject = load(GPT2, batch_size=3, seq_len=20, text=tmp_path / "text", dtype=torch.bfloat16)
    assert _ids(subject).shape == (3, 20)
    assert set(_ids(subject).flatten().tolist()) == {97, 98, 99, 100}
    assert subject.unigram_entropy == pytest.approx(math.log(4))
    assert subject.model.lm_head.weight.dtype == torch.bfloat16
    assert str(tmp_path / "text") in subject.input


def test_noise_takes_the_models_dtype() -> None:
    subject = load(VIT, dtype=torch.float64)
    assert isinstance(subject.batch, dict)
    assert subject.batch["pixel_values"].dtype == torch.float64


def test_a_short_context_gets_shorter_sequences() -> None:
    subject = load(f"{GPT2},n_positions=40")
    assert _ids(subject).shape == (4, 40)
    assert "4 sequences of 40 tokens (the model cannot take 64)" in subject.input


def test_a_small_vocabulary_gets_ranks() -> None:
    subject = load(f"hf:bert,{BERT},vocab_size=20")
    assert int(_ids(subject).max()) == 19
    hidden = subject.batch["labels"] != -100  # type: ignore[index, call-overload]
    assert torch.equal(hidden, _ids(subject) == 19)
    assert not (_ids(subject) == subject.model.config.pad_token_id).any()


def test_a_config_and_a_folder_with_weights(tmp_path: Path) -> None:
    original = load(f"{GPT2},vocab_size=300", seed=7).model
    original.save_pretrained(tmp_path)
    folder = load(f"hf:{tmp_path}")
    assert torch.equal(folder.model.lm_head.weight, original.lm_head.weight)
    assert folder.model.training
    random = load(f"hf:{tmp_path}/config.json,n_layer=2")
    assert len(random.model.transformer.h) == 2
    assert not torch.equal(random.model.lm_head.weight, original.lm_head.weight)


def test_a_config_in_half_precision_is_built_in_float32(tmp_path: Path) -> None:
    values = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    subject = load(f"hf:{tmp_path}")
    assert subject.model.lm_head.weight.dtype == torch.float32
    assert any("bfloat16" in note for note in subject.notes)


def test_an_infinite_number_of_a_saved_config_is_read(tmp_path: Path) -> None:
    values = {
        "model_type": "mamba2",
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_heads": 4,
        "head_dim": 8,
    }
    values |= {"n_groups": 1, "vocab_size": 64, "state_size": 4, "chunk_size": 4}
    limit = [0.0, {"__float__": "Infinity"}]  # as save_pretrained writes it
    (tmp_path / "config.json").write_text(json.dumps(values | {"time_step_limit": limit}))
    assert tuple(load(f"hf:{tmp_path}").model.config.time_step_limit) == (0.0, float("inf"))


def test_weights_of_another_model(tmp_path: Path) -> None:
    load(f"hf:bert,{BERT},vocab_size=300").model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2}')
    with pytest.raises(UsageError, match="no weight of"):
        load(f"hf:{tmp_path}")


def test_a_tokenizer_in_the_folder_makes_the_ids(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    load(f"{GPT2},vocab_size=300").model.save_pretrained(tmp_path)
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "import": 1, "def": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    subject = load(f"hf:{tmp_path}")
    assert "tokenizer.json" in subject.input
    assert int(_ids(subject).max()) <= 2
    assert "(the first 256 KiB)" in subject.input
    whole = load(f"hf:{tmp_path}", tokens=tmp_path / "tokens")
    assert "256 KiB" not in whole.input
    (kept,) = (tmp_path / "tokens").iterdir()
    assert kept.stat().st_size > 4 * 2**17, "a token of the default text has some six bytes"


def test_fake_tensors_need_no_memory() -> None:
    subject = load("hf:llama,hidden_size=16384,num_attention_heads=128,num_hidden_layers=2", fake=True)
    assert sum(p.numel() for p in subject.model.parameters()) > 2e9
    assert _ids(subject).shape == (4, 64)


def test_fake_tensors_for_a_model_that_looks_at_values_while_it_is_built() -> None:
    subject = load(f"hf:modernbert-decoder,{BERT}", fake=True)
    assert fake_mode_of(subject.model) is not None
    assert not any(parameter.is_meta for parameter in subject.model.parameters())


def test_characters_without_a_vocabulary() -> None:
    subject = load(f"hf:canine,{BERT}")
    assert int(_ids(subject).max()) < 256


def test_a_waveform_with_a_channel() -> None:
    subject = load("hf:encodec,num_filters=4,codebook_size=16,hidden_size=16")
    assert subject.batch["input_values"].shape == (4, 1, 16_000)  # type: ignore[index, call-overload]


@pytest.mark.parametrize("spec", [GPT2, f"hf:bert,{BERT}", VIT])
def test_a_bare_model_of_transformers_is_fed_as_by_name(spec: str) -> None:
    named = load(spec)
    bare = make_subject(named.model)
    assert isinstance(named.batch, dict)
    assert isinstance(bare.batch, dict)
    assert bare.input == named.input
    assert all(torch.equal(bare.batch[key], named.batch[key]) for key in named.batch)
    assert bare.spec == type(named.model).__name__


@pytest.mark.parametrize(
    "spec",
    [
        "hf:gpt2,n_layer=1,n_embd=32,n_head=2,n_positions=64,vocab_size=300",
        "hf:roberta,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,vocab_size=300,"
        "max_position_embeddings=64",
        "hf:opt,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,ffn_dim=64,vocab_size=300,"
        "word_embed_proj_dim=32,max_position_embeddings=64",
        "hf:llama,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=64,vocab_size=300,"
        "max_position_embeddings=64",
    ],
)
@pytest.mark.parametrize("seq_len", [62, 63, 64, 100])
def test_a_model_without_values_takes_sequences_as_long_as_a_real_one(spec: str, seq_len: int) -> None:
    real, fake = (load(spec, batch_size=1, seq_len=seq_len, fake=is_fake) for is_fake in (False, True))
    assert fake.input == real.input
