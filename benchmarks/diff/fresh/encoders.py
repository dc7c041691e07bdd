"""Published encoders, image classifiers and translators beside their ports, with their places by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.diff.families import Places
from benchmarks.diff.fresh.conversions import (
    deit,
    dino,
    distil,
    from_distil,
    from_images,
    from_modern,
    from_roberta,
    from_translator,
    modern,
    roberta,
    translator,
)
from benchmarks.diff.fresh.ports import Form, Modern, Reader, State, Translator, Vision
from benchmarks.diff.fresh.published import loaded, weights_of


@dataclass(frozen=True)
class Family:
    """A published model and its port.

    Attributes:
        published: fresh model from changes of its configuration.
        port: class of the port.
        form: options under which it is the same function.
        convert: state of the published model → state of the port.
        names: "attention", "mlp", "cross", "first" or "last" → modules of both sides, "*" for the layer.
        inputs: shapes: "ids", "image" or "both".
    """

    published: Callable[..., nn.Module]
    port: Callable[[Form], nn.Module]
    form: Form
    convert: Callable[[State, Form], State]
    names: Mapping[str, tuple[Places, Places]]
    inputs: str = "ids"

    def batch(self) -> Any:
        """A batch for both."""
        noise = torch.Generator().manual_seed(5)
        if self.inputs == "image":
            return {"pixel_values": torch.randn(4, 3, 16, 16, generator=noise)}
        ids = torch.randint(3, self.form.vocab, (4, 24), generator=noise)
        if self.inputs == "ids":
            return ids
        return {"input_ids": ids, "decoder_input_ids": ids.flip(1)[:, :17].clone()}

    def given(self, seed: int, **changes: Any) -> Any:
        """The published model with its weights."""
        return self.fed(loaded(self.published(**changes), weights_of(self.published, seed)))

    def ported(self, seed: int, change: Callable[[State], None] | None = None, **options: Any) -> Any:
        """The port with the converted weights."""
        state = self.convert(dict(weights_of(self.published, seed)), self.form)
        if change is not None:
            change(state)
        return self.fed(loaded(self.port(replace(self.form, **options)), state))

    def fed(self, model: nn.Module) -> Any:
        """The model, with its batch where the loader would not know it."""
        return model if self.inputs == "ids" else (model, self.batch())

    def places(self, where: str) -> tuple[Places, Places]:
        """Modules of both sides."""
        branch, _, layer = where.partition(" ")
        a, b = self.names[branch]
        return tuple(x.replace("*", layer) for x in a), tuple(x.replace("*", layer) for x in b)


_READER = {
    "attention": (("tower.*.mha", "tower.*.mha_norm"),),
    "mlp": (("tower.*.wide", "tower.*.wide_norm", "tower.*"),),
    "first": (("words", "places", "types", "start_norm"),),
    "last": (("dense", "dense_norm", "decoder"),),
}


def _names(ours: Mapping[str, tuple[Places]], **theirs: Places) -> dict[str, tuple[Places, Places]]:
    return {name: (places, ours[name][0]) for name, places in theirs.items()}


def _side(side: str) -> dict[str, tuple[Places, Places]]:
    """Places of a translator's encoder or decoder; those of the decoder are "d-attention" and so on."""
    old, new, head = f"model.{side}.layers.*", f"{side}.*", "d-" if side == "decoder" else ""
    made: dict[str, tuple[Places, Places]] = {
        f"{head}attention": (
            (f"{old}.self_attn", f"{old}.self_attn_layer_norm"),
            (f"{new}.att", f"{new}.att_norm"),
        ),
        f"{head}mlp": (
            (f"{old}.fc1", f"{old}.fc2", f"{old}.final_layer_norm", f"{old}.activation_fn", old),
            (f"{new}.ff", f"{new}.ff_norm"),
        ),
    }
    if head:
        made["cross"] = (
            (f"{old}.encoder_attn", f"{old}.encoder_attn_layer_norm"),
            (f"{new}.cross", f"{new}.cross_norm"),
        )
    return made


def _translators(kind: str, form: Form) -> Family:
    names = _side("encoder") | _side("decoder")
    starts = [
        f"model.{s}.{n}" for s in ("encoder", "decoder") for n in ("embed_positions", "layernorm_embedding")
    ]
    ours = ("shared", "enc_pos", "dec_pos", "enc_start", "dec_start")
    names["first"] = (
        ("model.shared", *starts, "model.encoder.embed_tokens", "model.decoder.embed_tokens"),
        ours,
    )
    last = ("model.encoder.layer_norm", "model.decoder.layer_norm", "lm_head")
    names["last"] = (last, ("enc_end", "dec_end", "shared"))
    return Family(partial(translator, kind), Translator, form, from_translator, names, "both")


_ROBERTA, _BLOCK = "roberta.encoder.layer.*", "blocks.*"
_VISION = {
    "attention": ((f"{_BLOCK}.attn", f"{_BLOCK}.norm1", f"{_BLOCK}.ls1", _BLOCK),),
    "mlp": ((f"{_BLOCK}.mlp", f"{_BLOCK}.norm2", f"{_BLOCK}.ls2", _BLOCK),),
    "first": (("patch_embed", "cls_token", "dist_token", "pos_embed"),),
    "last": (("norm", "head"),),
}
_MODERN = {
    "attention": (("layers.*.attention", "layers.*.pre_attn", "layers.*"),),
    "mlp": (("layers.*.ffn", "layers.*.pre_ffn", "layers.*"),),
    "first": (("emb", "emb_norm"),),
    "last": (("out_norm", "cls_dense", "cls_norm", "cls_out"),),
}
FAMILIES: dict[str, Family] = {
    "RoBERTa": Family(
        roberta,
        Reader,
        Form(60, 2, 4, 90, 120, pad=1, kinds=True),
        from_roberta,
        _names(
            _READER,
            attention=(f"{_ROBERTA}.attention",),
            mlp=(f"{_ROBERTA}.intermediate", f"{_ROBERTA}.output"),
            first=("roberta.embeddings",),
            last=("lm_head",),
        ),
    ),
    "DistilBERT": Family(
        distil,
        Reader,
        Form(44, 3, 4, 70, 95, eps=1e-12),
        from_distil,
        _names(
            _READER,
            attention=(
                "distilbert.transformer.layer.*.attention",
                "distilbert.transformer.layer.*.sa_layer_norm",
            ),
            mlp=("distilbert.transformer.layer.*.ffn", "distilbert.transformer.layer.*.output_layer_norm"),
            first=("distilbert.embeddings",),
            last=("vocab_transform", "vocab_layer_norm", "vocab_projector"),
        ),
    ),
    "ModernBERT": Family(
        modern,
        Modern,
        Form(56, 4, 4, 64, 200, spans=(None, 6, 6, None), bases=(160000.0, 10000.0, 10000.0, 160000.0)),
        from_modern,
        _names(
            _MODERN,
            attention=("model.layers.*.attn", "model.layers.*.attn_norm"),
            mlp=("model.layers.*.mlp", "model.layers.*.mlp_norm"),
            first=("model.embeddings",),
            last=("model.final_norm", "head", "decoder"),
        ),
    ),
    "DeiT": Family(
        deit,
        Vision,
        Form(42, 3, 3, 64, eps=1e-12, dist=True),
        from_images,
        _names(
            _VISION,
            attention=("deit.layers.*.attention", "deit.layers.*.layernorm_before"),
            mlp=("deit.layers.*.mlp", "deit.layers.*.layernorm_after"),
            first=("deit.embeddings",),
            last=("deit.layernorm", "classifier"),
        ),
        "image",
    ),
    "DINOv2": Family(
        dino,
        Vision,
        Form(40, 2, 4, 80, eps=1e-6, soft=True, pool="both"),
        from_images,
        _names(
            _VISION,
            attention=(
                "dinov2.encoder.layer.*.attention",
                "dinov2.encoder.layer.*.norm1",
                "dinov2.encoder.layer.*.layer_scale1",
            ),
            mlp=(
                "dinov2.encoder.layer.*.mlp",
                "dinov2.encoder.layer.*.norm2",
                "dinov2.encoder.layer.*.layer_scale2",
            ),
            first=("dinov2.embeddings",),
            last=("dinov2.layernorm", "classifier"),
        ),
        "image",
    ),
    "BART": _translators("bart", Form(48, 2, 4, 72, 140, first=2)),
    "Marian": _translators(
        "marian", Form(40, 2, 5, 60, 110, act="silu", sines=True, emb=40**0.5, emb_norm=False)
    ),
    "Pegasus": _translators(
        "pegasus", Form(36, 3, 4, 54, 75, act="relu", sines=True, emb=6.0, emb_norm=False, before=True)
    ),
}
"""Encoders, image models and translators by name."""
