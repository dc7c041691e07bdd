# # The null space of LayerNorm
#
# LayerNorm has two input directions that do not reach the output. This page shows them in the Jacobian, and
# shows how γ and ε change them.
#
# LayerNorm takes a vector z of width d, subtracts its mean and divides by its standard deviation. It
# forgets two things about z: its mean and its size.

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

from normscope.linalg import layer_norm_jacobian, left_kernel, numerical_rank, right_kernel, singular_values

torch.manual_seed(0)
d = 16
z = torch.randn(d, dtype=torch.float64)


def norm(v, weight=None, eps=0.0):
    return F.layer_norm(v, (d,), weight, eps=eps)


def jacobian(v, weight=None, eps=0.0):
    return torch.autograd.functional.jacobian(lambda u: norm(u, weight, eps), v)


# ## Two directions that leave no trace
#
# Add a number to all coordinates, or multiply them all by a positive number: the output is the same.

z_hat, one = norm(z), torch.ones(d, dtype=torch.float64)
print(f"LN(z + 3·1) − LN(z)   {(norm(z + 3 * one) - z_hat).norm():.0e}")
print(f"LN(3·z) − LN(z)       {(norm(3 * z) - z_hat).norm():.0e}")
assert torch.allclose(norm(z + 3 * one), z_hat)
assert torch.allclose(norm(3 * z), z_hat)

# The output does not change along 1 and along z. Their span is the span of 1 and ẑ = LN(z), which are
# orthogonal, so
#
#     J 1 = 0,   J ẑ = 0,   J = (1/σ)(I − 11ᵀ/d − ẑẑᵀ/d).
#
# The brackets contain the projector onto the directions that are orthogonal to both. A projector has only
# the singular values 1 and 0. So d − 2 directions pass with the same gain, 1/σ, and two do not pass at all.

J = layer_norm_jacobian(z, None, 0.0)
values = singular_values(J)
rank, gap = numerical_rank(values, tol=1e-10)
print(f"formula − autograd    {(J - jacobian(z)).abs().max():.0e}")
print(f"J·1, J·ẑ              {(J @ one).norm():.0e}, {(J @ z_hat).norm():.0e}")
print(f"rank                  {rank} of {d}")
print(f"1/σ                   {1 / z.std(correction=0):.4f}")
print(f"largest, d−2nd value  {values[0]:.4f}, {values[d - 3]:.4f}")
assert torch.allclose(J, jacobian(z))
assert rank == d - 2

# ## γ acts on the left
#
# A real LayerNorm ends with a gain, y = γ ⊙ LN(z) + β. By the chain rule its Jacobian is diag(γ) J: γ
# multiplies from the **left**. It acts on the output, so it does not change which inputs leave no trace.
# The *right* kernel {v : Jv = 0} is still span{1, ẑ}.
#
# The *left* kernel {u : uᵀJ = 0} does change. It becomes γ⁻¹ ⊙ span{1, ẑ}. This kernel matters for
# training, because a gradient u at the output arrives at the input as Jᵀu. It is the subject of the next
# page.

gamma = torch.exp(torch.randn(d, dtype=torch.float64) / 2)
J_gamma = jacobian(z, gamma)
right = right_kernel(z_hat, centred=True)  # [d, 2]
left, _ = left_kernel(z_hat, gamma, centred=True)  # [d, 2]
print(f"diag(γ) J − autograd  {(gamma[:, None] * J - J_gamma).abs().max():.0e}")
print(f"J diag(γ) − autograd  {(J * gamma - J_gamma).abs().max():.2f}")
print(f"J_γ  · span{{1, ẑ}}     {(J_gamma @ right).norm():.0e}")
print(f"J_γᵀ · span{{1, ẑ}}     {(J_gamma.T @ right).norm():.2f}")
print(f"J_γᵀ · γ⁻¹⊙span{{1, ẑ}} {(J_gamma.T @ left).norm():.0e}")
assert torch.allclose(gamma[:, None] * J, J_gamma)
assert not torch.allclose(J * gamma, J_gamma, atol=0.1)
assert (J_gamma @ right).norm() < 1e-12 < (J_gamma.T @ right).norm()
assert (J_gamma.T @ left).norm() < 1e-12

# ## ε closes one of the two
#
# Every implementation divides by s = √(var + ε). Adding a constant still changes nothing, so 1 stays in the
# kernel. Scaling does change something: a small z gives a smaller output than a large one. Along ẑ the gain
# is then ε/s³ instead of zero.
#
# Whether that matters depends only on the scale of z. If the variance is far above ε, this gain is
# negligible beside the 1/s of all other directions. If it is far below, ẑ passes as well as they do, and
# the rank is d − 1.

eps = 1e-5
scales = torch.logspace(-5, 1, 25, dtype=torch.float64)
relative = []
for scale in scales:
    J_eps = jacobian(scale * z, eps=eps)
    relative.append(float((J_eps @ z_hat).norm() / z_hat.norm() / torch.linalg.matrix_norm(J_eps, 2)))

variance = z.var(correction=0) * scales**2
formula = eps / (variance + eps)
for index in (0, 8, 12, 24):
    print(f"variance {variance[index]:7.1e}   gain of ẑ beside the others {relative[index]:.1e}")
assert torch.allclose(torch.tensor(relative, dtype=torch.float64), formula)
assert relative[0] > 0.99
assert relative[-1] < 1e-6

# ## Both effects in one picture
#
# Left: the singular values of J in order. Right: the relative gain of ẑ as z grows.

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
figure, (first, second) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
first.plot(range(1, d + 1), values, "o", color="#1f5a99")
first.axhline(float(1 / z.std(correction=0)), color="#999999", linewidth=1, zorder=0)
first.set(title="singular values of J, d = 16", xlabel="index", ylim=(-0.05, None))
second.loglog(variance, relative, "o", color="#1f5a99", markersize=4, label="measured")
second.loglog(variance, formula, color="#999999", linewidth=1, zorder=0, label="ε/(var + ε)")
second.axvline(eps, color="#c44e2b", linewidth=1, linestyle=":")
second.annotate("var = ε", (eps * 1.5, 3e-6), color="#c44e2b")
second.set(title="gain of ẑ beside the others, ε = 1e-5", xlabel="variance of z")
second.legend(frameon=False)
plt.savefig("01_null_space_of_layernorm.png", dpi=110)  # Fourteen equal values and two zeros; a falling curve

# This page does not show that a network with LayerNorm has a fault. A direction that does not pass one norm
# is lost at that norm. Whether the network needs it depends on where the norm is placed, and on the
# gradients along that direction.
