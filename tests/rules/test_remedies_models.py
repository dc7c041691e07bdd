"""Tests of each remedy of a model against the same change made by hand."""

import copy
import dataclasses
import itertools

import pytest
import torch
from remedy_subjects import CONFIG, SUBJECTS, HandPost, given
from torch import Tensor, nn

from normscope.anatomy import capture, measuring, read_anatomy
from normscope.demo.examples import CausalEncoder
from normscope.forecast.targets import find_head
from normscope.nn.placement import Where
from normscope.nn.schemes.deepnorm import alpha, beta
from normscope.rules.remedies import REMEDIES, NotApplicable
from normscope.rules.remedies.head import COUNTED_BATCHES, count_targets, log_frequencies
from normscope.rules.remedies.remedy import with_copy
from normscope.rules.remedies.scaling import scale_as_deepnorm
from normscope.subjects import Subject, load, make_subject
from normscope.train import endless

POST = [name for name in SUBJECTS if name.endswith("post") and "res" not in name]


def applied(name: str, remedy: str) -> Subject:
    subject, anatomy = given(name)
    return REMEDIES[remedy].apply(subject, anatomy, CONFIG)[0]


def logits(subject: Subject, model: nn.Module | None = None) -> Tensor:
    """Logits of the fixed batch, in eval mode."""
    model = copy.deepcopy(subject.model if model is None else model).eval()
    output = subject.forward(model=model)
    return getattr(output, "logits", output).detach()


def test_there_are_post_ln_subjects_of_three_kinds() -> None:
    assert {"nn-post", "torch-post", "hand-post"} <= set(POST)


@pytest.mark.parametrize("name", [*POST, "nn-encoder-decoder", "bert", "opt", "nn-res-post", "nn-deepnorm"])
def test_pre_ln_is_read_back(name: str) -> None:
    reading = read_anatomy(applied(name, "pre-ln"))
    assert {branch.placement for branch in reading.branches} == {"pre"}
    assert reading.final_norm
    assert len(reading.blocks) == len(given(name)[1].blocks)


def test_moved_norms_are_pre_ln_by_hand() -> None:
    torch.manual_seed(4)
    model = HandPost()
    for parameter in model.parameters():  # gains that differ: each norm must go with its own branch
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    subject = make_subject(model, batch_size=2, seq_len=16)
    changed, _ = REMEDIES["pre-ln"].apply(subject, read_anatomy(subject), CONFIG)
    x = model.embedding(subject.batch)
    for block in model.blocks:
        x = x + block.attention(block.norm1(x))
        x = x + block.feed_forward(block.norm2(x))
    torch.testing.assert_close(logits(changed), model.head(model.blocks[-1].norm2(x)).detach())


def test_pytorchs_layers_are_turned_as_their_own_option_does() -> None:
    subject, _ = given("torch-post")
    own = CausalEncoder(depth=3, width=24, norm_first=True, final_norm=True)
    own.load_state_dict(subject.model.state_dict(), strict=False)
    torch.testing.assert_close(logits(applied("torch-post", "pre-ln")), logits(subject, own))


def test_the_scales_are_our_deepnorm() -> None:
    specs = [f"nn:decoder,scheme={scheme},depth=3,width=24,heads=2" for scheme in ("post", "deepnorm")]
    post, deep = (load(spec, seed=5, batch_size=2, seq_len=16) for spec in specs)
    shrink = beta(Where(1, 3))
    with torch.no_grad():
        for (name, old), new in zip(post.model.named_parameters(), deep.model.parameters(), strict=True):
            shrunk = name.endswith(tuple(f".{role}.weight" for role in ("v", "o", "up", "down")))
            new.copy_(old * shrink if shrunk else old)
    changed = with_copy(post)
    scale_as_deepnorm(changed, read_anatomy(post))
    torch.testing.assert_close(logits(changed), logits(deep), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(changed), logits(post), atol=1e-2)


def test_the_scales_on_pytorchs_layers_are_deepnorm_by_hand() -> None:
    subject, _ = given("torch-post")
    model = copy.deepcopy(subject.model).eval()
    width, where = 24, Where(1, 3)
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.self_attn.in_proj_weight[2 * width :] *= beta(where)
            for linear in (layer.self_attn.out_proj, layer.linear1, layer.linear2):
                linear.weight *= beta(where)
    length = subject.batch.shape[1]
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    x = model.embedding(subject.batch) + model.position(torch.arange(length))
    for layer in model.encoder.layers:
        x = layer.norm1(alpha(where) * x + layer._sa_block(x, mask, None, is_causal=True))
        x = layer.norm2(alpha(where) * x + layer._ff_block(x))
    changed = applied("torch-post", "deepnorm")
    torch.testing.assert_close(logits(changed), model.head(x).detach(), rtol=1e-4, atol=1e-5)
    learnt = [sum(p.numel() for p in m.parameters()) for m in (changed.model, subject.model)]
    assert learnt[0] == learnt[1]


def test_other_schemes_of_ours_are_built_as_their_spec_says() -> None:
    spec = "nn:decoder,scheme={},depth=3,width=24,heads=2"
    for remedy, scheme in (("pre-ln", "pre"), ("deepnorm", "deepnorm")):
        own = load(spec.format(scheme), seed=3, batch_size=2, seq_len=16)
        torch.testing.assert_close(logits(applied("nn-post", remedy)), logits(own), rtol=0, atol=0)


def test_trained_weights_are_kept_where_a_scheme_is_swapped() -> None:
    subject = load("nn:decoder,scheme=post,depth=2,width=16,heads=2", batch_size=2, seq_len=16)
    with torch.no_grad():
        for parameter in subject.model.parameters():
            parameter.add_(0.01)
    anatomy = read_anatomy(subject)
    changed, _ = REMEDIES["pre-ln"].apply(subject, anatomy, CONFIG)
    old, new = (dict(s.model.named_parameters()) for s in (subject, changed))
    torch.testing.assert_close(new["blocks.0.attention.q.weight"], old["blocks.0.attention.q.weight"])
    with pytest.raises(NotApplicable, match="trained"):
        REMEDIES["qk-norm"].apply(subject, anatomy, CONFIG)


@pytest.mark.parametrize("name", ["nn-post", "hand-post", "torch-post"])
def test_small_matrices_keep_their_direction(name: str) -> None:
    old = dict(given(name)[0].model.named_parameters())
    for path, parameter in applied(name, "small-init").model.named_parameters():
        if parameter.dim() < 2:
            assert torch.equal(parameter, old[path])
            continue
        assert float(parameter.detach().square().mean().sqrt()) < 0.0221
        cosine = nn.functional.cosine_similarity(parameter.flatten(), old[path].flatten(), dim=0)
        assert float(cosine.detach()) == pytest.approx(1.0, abs=1e-5)


def test_last_maps_are_divided_by_the_root_of_the_number_of_branches() -> None:
    old = dict(given("hand-post")[0].model.named_parameters())
    for path, parameter in applied("hand-post", "branch-scale").model.named_parameters():
        factor = 6**-0.5 if path.endswith(("o.weight", "down.weight")) else 1.0
        torch.testing.assert_close(parameter, old[path] * factor)


def labels_of(name: str, batch: object) -> Tensor:
    """The targets of a batch, read where they are kept."""
    if isinstance(batch, Tensor):
        return batch[:, 1:]
    labels = batch["labels"]  # type: ignore[index]
    return labels[:, 1:] if name in ("gpt2", "llama") else labels  # these shift by themselves


@pytest.mark.parametrize("name", ["nn-post", "nn-encoder", "torch-post", "hand-post", "bert", "gpt2"])
def test_targets_are_counted_from_the_gradient_as_from_the_labels(name: str) -> None:
    subject = with_copy(given(name)[0])
    subject.model.eval()
    counted = count_targets(subject, find_head(subject))
    batches = itertools.islice(endless(subject.batches), COUNTED_BATCHES)
    labels = torch.cat([labels_of(name, batch).flatten() for batch in batches])
    expected = torch.bincount(labels[labels >= 0], minlength=len(counted))
    assert torch.equal(counted, expected.double())


@pytest.mark.parametrize("name", ["nn-post", "hand-post", "gpt2"])
def test_with_the_bias_alone_the_loss_is_that_of_the_frequencies(name: str) -> None:
    subject = applied(name, "output-bias")
    subject.model.eval()
    head = find_head(subject)
    counts = count_targets(subject, head)
    log_V = log_frequencies(counts)
    torch.testing.assert_close(head.bias.detach().double().log_softmax(0), log_V, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        head.weight.zero_()
        batches = list(itertools.islice(endless(subject.batches), COUNTED_BATCHES))
        losses = [float(subject.loss(batch)) for batch in batches]
    expected = float(-(counts / counts.sum() * log_V).sum())
    assert sum(losses) / len(losses) == pytest.approx(expected, abs=1e-4)
    assert expected == pytest.approx(subject.unigram_entropy, abs=0.4)  # few tokens were counted


def test_a_bias_that_is_there_already_is_seen_without_a_mark() -> None:
    changed = dataclasses.replace(applied("hand-post", "output-bias"), notes=())
    with pytest.raises(NotApplicable, match="already"):
        REMEDIES["output-bias"].apply(changed, given("hand-post")[1], CONFIG)


def test_a_regression_has_no_frequencies() -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    model = nn.Sequential(nn.Linear(8, 16), encoder, nn.Linear(16, 8))
    subject = make_subject(model, torch.randn(4, 16, 8), lambda out, batch: (out - batch).square().mean())
    with pytest.raises(NotApplicable, match="cross-entropy"):
        REMEDIES["output-bias"].apply(subject, read_anatomy(subject), CONFIG)


def lengths(subject: Subject) -> list[Tensor]:
    """‖q‖ and ‖k‖ of every head and token, as the attentions' q·kᵀ meets them: (…, T, K) and (…, K, T)."""
    attentions = [a for branch in read_anatomy(subject).branches for a in branch.attention]
    with measuring(subject.model):
        sites = [site for a in attentions for site in (a.query, a.key)]
        _, found = capture(subject.model, subject.forward, sites)
    queries = [found[a.query].detach().norm(dim=-1) for a in attentions]
    keys = [found[a.key].detach().norm(dim=-2) for a in attentions]
    return queries + keys


@pytest.mark.parametrize("name", ["nn-post", "hand-post", "llama", "bert", "nn-encoder-decoder"])
def test_queries_and_keys_have_one_length(name: str) -> None:
    for before in lengths(given(name)[0]):
        assert before.std() > 0.05 * before.mean()
    after = lengths(applied(name, "qk-norm"))
    assert after
    for each in after:
        assert each.std() < 0.02 * each.mean()


def test_norms_are_wide_in_a_model_of_half_precision() -> None:
    torch.manual_seed(4)
    subject = make_subject(HandPost().bfloat16(), batch_size=2, seq_len=16)
    changed, _ = REMEDIES["norms-float32"].apply(subject, read_anatomy(subject), CONFIG)
    for module in changed.model.modules():
        wanted = torch.float32 if isinstance(module, nn.LayerNorm) else torch.bfloat16
        assert {p.dtype for p in module.parameters(recurse=False)} <= {wanted}
    out = logits(changed)
    assert out.dtype == torch.bfloat16
    assert torch.isfinite(out).all()


def test_odd_eps_is_set_and_nothing_else() -> None:
    subject, changed = given("bert")[0], applied("bert", "norm-eps")
    norms = [m for m in changed.model.modules() if isinstance(m, nn.LayerNorm)]
    blocks = [m.eps for path, m in changed.model.named_modules() if "encoder.layer" in path and m in norms]
    assert blocks == [1e-5] * len(blocks)
    assert len(blocks) == 4
    old = subject.model.state_dict()
    assert all(torch.equal(value, old[name]) for name, value in changed.model.state_dict().items())


def test_a_final_norm_stands_behind_the_last_block() -> None:
    changed = applied("nn-no-final", "final-norm")
    assert read_anatomy(changed).final_norm
    assert not given("nn-no-final")[1].final_norm
