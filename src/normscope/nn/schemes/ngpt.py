"""nGPT (Loshchilov et al. 2024, arXiv:2410.01131): every vector along the width has unit length."""

from torch import Tensor, nn

from normscope.nn.gain import Gain
from normscope.nn.joins import Built, Norm, Update
from normscope.nn.placement import Slot, norms_at
from normscope.nn.scheme import Initialisation, Inside, Scheme


class StepTowards(nn.Module):
    """N(h + |α| (F(h) − h)), α one number a feature from `start`."""

    def __init__(self, width: int, start: float = 0.05) -> None:
        super().__init__()
        self.alpha = Gain((width,), start=start, held=width**-0.5)

    def forward(self, h_BTD: Tensor, update: Update, norm: Norm) -> Tensor:
        return norm(h_BTD + self.alpha().abs() * (update(h_BTD) - h_BTD))


NGPT = Scheme(
    "ngpt",
    "N(x + |α|⊙(N(F(x)) − x)), N(x) = x/‖x‖, α = .05 at the start",
    norms_at(Slot.ENTRY, Slot.BRANCH_OUT, Slot.STREAM),
    "Loshchilov et al. 2024, arXiv:2410.01131",
    join=Built("learnt", lambda site: StepTowards(site.width)),
    initialisation=Initialisation("fan-in"),
    inside=Inside(qk_norm="unit", hidden_gain=True),
    norm="unit",
    on_sphere=True,
)
