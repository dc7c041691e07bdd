"""Laws of all remedies on subjects of every kind: each changes a copy once, and the copy can be trained."""

import pytest
import torch
from remedy_subjects import CONFIG, SUBJECTS, fingerprint, given, same

from normscope.rules import RULES
from normscope.rules.remedies import REMEDIES, NotApplicable, head

# Which of the remedies of models apply; all others must say why not.
APPLICABLE = {
    "nn-post": {"small-init", "branch-scale", "output-bias", "pre-ln", "deepnorm", "qk-norm"},
    "nn-pre": {"small-init", "branch-scale", "output-bias", "qk-norm"},
    "nn-res-post": {"branch-scale", "output-bias", "pre-ln", "qk-norm"},
    "nn-no-final": {"branch-scale", "output-bias", "qk-norm", "final-norm"},
    "nn-deepnorm": {"small-init", "branch-scale", "output-bias", "pre-ln", "qk-norm"},
    "nn-encoder": {"small-init", "branch-scale", "output-bias", "pre-ln", "deepnorm", "qk-norm"},
    "nn-encoder-decoder": {"small-init", "branch-scale", "output-bias", "pre-ln", "deepnorm", "qk-norm"},
    "torch-post": {"small-init", "branch-scale", "output-bias", "pre-ln", "deepnorm"},
    "hand-post": {"small-init", "branch-scale", "output-bias", "pre-ln", "deepnorm", "qk-norm"},
    "bert": {"branch-scale", "output-bias", "pre-ln", "deepnorm", "qk-norm", "norm-eps"},
    "gpt2": {"output-bias"},
    "llama": {"branch-scale", "output-bias", "qk-norm"},
    "opt": {"branch-scale", "output-bias", "pre-ln", "deepnorm", "qk-norm"},
}
FEW_BATCHES = 2
PAIRS = [(name, remedy) for name in SUBJECTS for remedy in REMEDIES]


@pytest.mark.parametrize(("name", "remedy"), PAIRS)
def test_a_remedy_changes_a_copy_once_or_says_why_not(
    name: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "COUNTED_BATCHES", FEW_BATCHES)
    subject, anatomy = given(name)
    before = fingerprint(subject.model)
    changed, settings, reason = subject, CONFIG, ""
    try:
        changed, settings = REMEDIES[remedy].apply(subject, anatomy, CONFIG)
    except NotApplicable as refusal:
        reason = refusal.reason
    after = fingerprint(subject.model)
    for part in before:
        assert same(before[part], after[part]), part
    refused = (changed, settings) == (subject, CONFIG)
    assert refused == bool(reason)
    assert refused == (REMEDIES[remedy].reach > 0 and remedy not in APPLICABLE[name])
    if refused:
        return
    assert (changed is subject) == (REMEDIES[remedy].reach == 0)
    assert (settings == CONFIG) == (changed is not subject)
    if changed is not subject:
        assert changed.model is not subject.model
        assert not {id(p) for p in changed.model.parameters()} & {id(p) for p in subject.model.parameters()}
        _learns(changed)
        with pytest.raises(NotApplicable):
            REMEDIES[remedy].apply(changed, anatomy, settings)


def _learns(subject) -> None:
    """Assert that the loss reaches the parameters and that the loss and all gradients are finite."""
    loss = subject.loss()
    loss.backward()
    assert torch.isfinite(loss)
    gradients = [p.grad for p in subject.model.parameters() if p.grad is not None]
    assert len(gradients) > 5
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)


@pytest.mark.parametrize("remedy", [r for r in REMEDIES.values() if r.reach == 0], ids=lambda r: r.name)
def test_settings_change_until_nothing_is_left_to_change(remedy) -> None:
    subject, anatomy = given("nn-post")
    settings = CONFIG
    for _ in range(3):
        try:
            _, other = remedy.apply(subject, anatomy, settings)
        except NotApplicable:
            break
        assert other != settings
        settings = other
    assert settings.lr < CONFIG.lr or (settings.warmup, settings.clip, settings.eps) != (0, None, None)


@pytest.mark.parametrize("remedy", REMEDIES.values(), ids=lambda r: r.name)
def test_a_remedy_says_what_it_changes_costs_and_where_it_comes_from(remedy) -> None:
    assert all((remedy.summary, remedy.code, remedy.cost, remedy.source))
    assert remedy.reach in (0, 1, 2)
    assert "\n" not in remedy.summary + remedy.code + remedy.cost + remedy.source


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_findings_name_remedies_that_there_are(rule) -> None:
    assert set(rule.remedies) <= set(REMEDIES)
    assert len(set(rule.remedies)) == len(rule.remedies)


def test_every_remedy_stands_against_some_finding() -> None:
    assert set(REMEDIES) == {name for rule in RULES.values() for name in rule.remedies}
