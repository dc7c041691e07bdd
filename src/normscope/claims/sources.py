"""The five texts whose claims are tested, and where in them a claim stands."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """One of the sources: its number, its own title, and a description in English."""

    id: str
    title: str
    english: str


_PROOF = "a proof that Post-LN's Jacobian loses rank and Pre-LN's does not"
_TEXTS = (
    Text("000", "Post-LN Transformer 训练不稳定性的数学分析", _PROOF),
    Text("001", "Transformer归一化位置影响训练稳定性", "a chat about why the norm goes before the sublayer"),
    Text("002", "Post-Norm 结构与 Pre-Norm 结构", "notes on the recursions of gradients in both placements"),
    Text(
        "003",
        "深入理解 Pre-LayerNorm：让 Transformer 训练更稳",
        "a blog post in praise of Pre-LN and RMSNorm",
    ),
    Text(
        "004", "Layer Normalization & 残差连接", "a long article on norms and residuals, written by a machine"
    ),
)
TEXTS: dict[str, Text] = {text.id: text for text in _TEXTS}


@dataclass(frozen=True)
class Source:
    """A place in a text.

    Attributes:
        text: its number, a key of `TEXTS`.
        where: theorem, equation or section, as the text counts them: "Theorem 2.2", "§5.3.2", "(13)–(14)".
        words: the claim's own words, a phrase to find it by.
    """

    text: str
    where: str
    words: str = ""

    @property
    def anchor(self) -> str:
        """Anchor of the place on a page: 000-theorem-2-2; Chinese headings keep their letters."""
        return f"{self.text}-" + re.sub(r"[^0-9a-z\u4e00-\u9fff]+", "-", self.where.lower()).strip("-")
