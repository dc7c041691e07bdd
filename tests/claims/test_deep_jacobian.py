"""A13, A14, A22 and A24 on one seed: exponents, ranks and kernels that theory gives."""

import pytest
import torch

from normscope.claims import CLAIMS, ClaimResult, Setup, Verdict, measure_claim
from normscope.claims import registry as _registry  # fills CLAIMS  # noqa: F401
from normscope.claims.deep_jacobian import PRIMES, _modulo
from normscope.claims.exact import exact_rank
from normscope.claims.experiments import jacobian
from normscope.claims.real_blocks import at_last_token, started, sublayers

LOOK = Setup(seeds=(0,))


def of(id: str) -> ClaimResult:
    found = measure_claim(CLAIMS[id], LOOK)
    assert found.error is None
    return found


def test_the_remainder_is_quadratic_but_for_kinks() -> None:
    found = of("A13")
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.judgement.outside == 2, "a kink is outside of Assumption 6.1"
    for case in found.evidence.cases:
        if not case.part:
            assert case.value == pytest.approx(1 if "kink" in case.where else 2, abs=0.05)
    assert found.parts["chain"].verdict is Verdict.HOLDS


def test_rank_stays_and_float64_loses_it() -> None:
    found = of("A14")
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.parts["exactly"].verdict is Verdict.HOLDS
    assert found.parts["float64"].verdict is Verdict.CONDITION
    assert found.evidence.figure is not None
    assert found.evidence.figure.value > 30


def test_products_keep_their_floor() -> None:
    assert of("A22").judgement.verdict is Verdict.HOLDS


def test_the_final_norm_erases_two() -> None:
    found = of("A24")
    assert found.judgement.verdict is Verdict.HOLDS
    assert found.parts["final"].verdict is Verdict.REFUTED
    assert {case.value for case in found.evidence.cases} == {0, 2}


@pytest.mark.parametrize("prime", PRIMES)
def test_rank_modulo_a_prime(prime: int) -> None:
    no_branch = ([1.0, 2.0, 4.5, -0.25], torch.zeros(4, 4).tolist())
    assert exact_rank(_modulo(no_branch, prime), prime) == 2
    cancelling = ([1.0, 2.0, 4.5, -0.25], (-torch.eye(4)).tolist())
    assert exact_rank(_modulo(cancelling, prime), prime) == 0


def test_one_token_through_a_cache_is_the_token_in_its_sequence() -> None:
    model, ids = started("post", init="xavier", depth=2, width=16, seed=0)
    for layer in sublayers(model, ids):
        f, x = at_last_token(layer, layer.x)
        assert torch.allclose(f(x)[0], layer(layer.x)[0, -1], atol=1e-12)
        whole = torch.autograd.functional.jacobian(layer, layer.x)[0, -1, :, 0, -1]
        assert torch.allclose(jacobian(f, x), whole, atol=1e-12)
