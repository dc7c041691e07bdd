"""A check does not change the model, the generators or global switches."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from small_models import MODELS
from torch import Tensor, nn

import normscope


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a check could leave changed, bit for bit."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict(keep_vars=False).items()},
        "buffers": {name: value.clone() for name, value in model.named_buffers()},
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "identity": {name: id(p) for name, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: [
                list(getattr(module, hooks))
                for hooks in (
                    "_forward_hooks",
                    "_forward_pre_hooks",
                    "_backward_hooks",
                    "_backward_pre_hooks",
                )
            ]
            for name, module in model.named_modules()
        },
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "dtypes": {name: (p.dtype, p.device) for name, p in model.named_parameters()},
    }


def switches() -> dict[str, Any]:
    return {
        "torch rng": torch.get_rng_state(),
        "numpy rng": np.random.get_state()[1].copy(),  # noqa: NPY002  (the legacy generator is what models use)
        "python rng": random.getstate(),
        "grad": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(),
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "denormals flushed": bool((torch.tensor([1e-40]) * 1.0).item() == 0.0),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def worn(model: nn.Module) -> nn.Module:
    """A model with mixed state: half in eval mode, a frozen part, a hook, a gradient."""
    modules = list(model.modules())
    model.train()
    modules[len(modules) // 2].eval()
    parameters = list(model.parameters())
    parameters[1].requires_grad_(False)
    parameters[0].grad = torch.ones_like(parameters[0])
    modules[-1].register_forward_hook(lambda module, inputs, output: None)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_check_leaves_everything_as_it_was(name: str) -> None:
    model = worn(MODELS[name]())
    batch = torch.randint(0, 256, (2, 16))
    before, switches_before = fingerprint(model), switches()
    report = normscope.check(model, batch, steps=2)
    after, switches_after = fingerprint(model), switches()
    assert len(report.measurements) > 20
    for key in before:
        assert same(before[key], after[key]), key
    for key in switches_before:
        assert same(switches_before[key], switches_after[key]), key


def test_check_restores_after_ctrl_c() -> None:
    model = worn(MODELS["pre"]())
    before = fingerprint(model)

    def stop(stage: str, done: int, total: int) -> None:
        if "forecast, step" in stage:
            raise KeyboardInterrupt

    with pytest.raises(normscope.CheckInterrupted) as caught:
        normscope.check(model, torch.randint(0, 256, (2, 16)), steps=5, progress=stop)
    assert caught.value.report.measurements.of("stream/rms")
    assert caught.value.report.verdict == "interrupted"
    assert caught.value.report.cut_short == "interrupted: the report has the measurements so far"
    after = fingerprint(model)
    for key in before:
        assert same(before[key], after[key]), key


def test_the_fingerprint_sees_each_kind_of_change() -> None:
    def touch_state(m: nn.Module) -> None:
        with torch.no_grad():
            next(m.parameters()).add_(1e-6)

    changes = {
        "state": touch_state,
        "gradients": lambda m: next(m.parameters()).sum().backward(),
        "requires_grad": lambda m: list(m.parameters())[-1].requires_grad_(False),
        "modes": lambda m: m.eval(),
        "hooks": lambda m: m.register_forward_hook(lambda *_: None),
        "attributes": lambda m: setattr(m, "left_behind", 1),
    }
    for key, change in changes.items():
        model = MODELS["buffers"]()
        before = fingerprint(model)
        change(model)
        assert not same(before[key], fingerprint(model)[key]), key


def test_a_check_interrupted_while_it_reads_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was not read is not one in which no branch could be read (NS104)."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("normscope.pipeline.read_anatomy", interrupted)
    with pytest.raises(normscope.CheckInterrupted) as caught:
        normscope.check(nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256)), steps=0)
    report = caught.value.report
    assert (report.verdict, report.findings) == ("interrupted", ())
