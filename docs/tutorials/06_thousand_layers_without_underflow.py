# # 1000 layers without underflow
#
# To see what a stack of 1000 layers does to a gradient, one would multiply 1000 Jacobians and compute the
# singular values. This takes one line of code, and its result is wrong. This page shows how it fails, first
# with round-off and then with zeros. It then computes the logarithms of the singular values without ever
# forming the product.

import math

import matplotlib.pyplot as plt
import torch

from normscope.linalg import layer_norm_jacobian, lyapunov_exponents, product_log_singular_values

torch.manual_seed(0)
torch.set_num_threads(1)
d, L = 8, 1000

# ## A product whose answer is known
#
# Take factors with independent entries N(0, 1/d). Each keeps the length of a vector on average, so the
# factors are harmless. For such a product, theory gives the growth per layer of each singular value in the
# limit of many layers (Newman 1986): λᵢ = ½(ψ((d − i + 1)/2) + log(2/d)).

factors = torch.randn(L, d, d, dtype=torch.float64) / d**0.5
index = torch.arange(1, d + 1, dtype=torch.float64)
theory = (torch.digamma((d - index + 1) / 2) + math.log(2 / d)) / 2
print("growth a layer, in theory:", " ".join(f"{x:.3f}" for x in theory))


def plain(layers):
    """log σ of the product as everybody would write it."""
    product = torch.eye(d, dtype=torch.float64)
    for layer in layers:
        product = layer @ product
    return torch.linalg.svdvals(product).log()


def careful(layers):
    """log σ from a product that is never formed."""
    return product_log_singular_values(layers).log_values


# ## A depth where both work
#
# After ten layers both give the same result.

for name, way in (("plain", plain), ("careful", careful)):
    print(f"{name:8} {' '.join(f'{x:7.2f}' for x in way(factors[:10]))}")
assert torch.allclose(plain(factors[:10]), careful(factors[:10]), atol=1e-6)

# ## Wrong without a warning
#
# After a hundred layers the largest values still agree. The small ones do not. In float64 a matrix holds
# numbers down to about 1e-16 of its largest one; anything smaller is round-off. The plain product reports
# that round-off as singular values, without a warning.

depth = 100
wrong, right = plain(factors[:depth]), careful(factors[:depth])
print(f"{'i':>3} {'plain':>9} {'careful':>9}")
for i in range(d):
    shown = f"{wrong[i]:9.1f}" if abs(wrong[i] - right[i]) < 0.05 else "round-off"
    print(f"{i + 1:3} {shown:>9} {right[i]:9.1f}")
floor = float(right[0]) + math.log(torch.finfo(torch.float64).eps)
assert abs(wrong[0] - right[0]) < 1e-6
assert right[-1] < floor - 50  # where the value is
assert wrong[-1] > floor - 15  # where the plain product has it

# ## Zeros
#
# Now let each layer shrink by another factor of 3. After a thousand layers the entries themselves leave the
# range of float64, which ends at e⁻⁷⁴⁵. All singular values are zero, and their logarithms −∞. In float32
# the range ends at e⁻¹⁰³.

shrinking = factors / 3
zeros = plain(shrinking)
values = careful(shrinking)
print(f"plain     log σ₁ = {zeros[0]:.0f}")
print(f"careful   log σ₁ = {values[0]:.1f},  log σ₈ = {values[-1]:.1f}")
assert torch.isinf(zeros).all()
assert torch.isfinite(values).all()
assert torch.allclose(values, careful(factors) - L * math.log(3))

# ## The method
#
# Keep the product as Q · D · T: Q is orthogonal, D is diagonal with its exponents stored separately as
# integers, T is well conditioned. A new layer multiplies Q, whose entries are of size 1, and the columns
# are sorted by size. A QR decomposition gives the new Q and a triangle whose row sizes go into D. Scales
# are only ever added as exponents, so nothing leaves the range, and a small singular value is never added
# to a large one. At the end the singular values are computed from D · T, one scale at a time.
#
# The averages of the logarithms on the diagonals of these triangles are the **Lyapunov exponents**. They
# are cheaper, and here they agree with the theory.

measured = lyapunov_exponents(factors)
per_layer = careful(factors) / L
print(f"{'i':>3} {'theory':>8} {'exponent':>9} {'(log σ)/L':>10}")
for i in range(d):
    print(f"{i + 1:3} {theory[i]:8.3f} {measured.values[i]:9.3f} {per_layer[i]:10.3f}")
assert ((measured.values - theory).abs() < 2 * measured.error + 0.01).all()
assert (per_layer - theory).abs().max() < 0.1

# They are averages for long stacks, not singular values. For example, a shear [[1, 100], [0, 1]] has
# exponents 0 and still stretches a vector a hundredfold.

shear = torch.tensor([[1.0, 100.0], [0.0, 1.0]], dtype=torch.float64)[None]
print(f"shear: exponent {lyapunov_exponents(shear).values[0]:.1f}, log σ {careful(shear)[0]:.2f}")
assert lyapunov_exponents(shear).values.abs().max() < 1e-12
assert abs(careful(shear)[0] - math.log(100)) < 1e-3

# ## A Post-LN stack
#
# Now take layers as in a Post-LN stack, for one token and a linear branch: J = J_LN(z) (I + W). Each norm
# has a kernel of two directions. So two singular values are zero from the first layer on, at any depth: log
# σ = −∞, and this is exact. The plain product has numbers there.

z = torch.randn(L, d, dtype=torch.float64) * 2**0.5
branch = torch.randn(L, d, d, dtype=torch.float64) / d**0.5
layers = layer_norm_jacobian(z, None, 0.0) @ (torch.eye(d, dtype=torch.float64) + branch)
post = careful(layers)
print("careful", " ".join(f"{x:7.0f}" for x in post))
print(f"plain: {int(plain(layers).isfinite().sum())} of {d} values are not zero")
assert plain(layers).isfinite().all()
assert torch.isinf(post[-2:]).all()
assert torch.isfinite(post[:-2]).all()

# ## The picture
#
# Left: the plain product of the Gaussian stack. It follows the true lines down to the round-off of the
# largest value (dotted), and below that it shows noise. Right: the product in logarithms, with the theory
# in grey.

depths = list(range(5, 201, 5))
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
for ax, way, name in zip(axes, (plain, careful), ("the plain product", "the careful one"), strict=True):
    lines = torch.stack([way(factors[:n]) for n in depths])
    for i in range(d):
        ax.plot(depths, lines[:, i], color=plt.cm.viridis(i / d), linewidth=1.3)
    ax.set(title=name, xlabel="layers")
    if way is plain:
        ax.plot(depths, lines[:, 0] - 36, color="#c44e2b", linestyle=":", label="round-off of the largest")
        ax.legend(frameon=False, loc="lower left")
    else:
        for rate in theory:
            ax.plot(depths, rate * torch.tensor(depths), color="#999999", linewidth=0.8, zorder=0)
axes[0].set_ylabel("log σ")
plt.savefig("06_thousand_layers_without_underflow.png", dpi=85)  # Lines that stop falling; lines that do not

# The lesson: a singular value of a deep product needs its own exponent. If a tool reports the rank or the
# condition number of a deep stack, check whether it formed the product.
