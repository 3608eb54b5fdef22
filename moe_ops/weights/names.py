"""The names that checkpoints give to the tensors of an MoE layer, and what they mean.

A name is read below the prefix of its layer (`model.layers.3.mlp`), in two steps: a `Style` finds
the projection and the expert, and the rest of the name says what of the weight the tensor holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from moe_ops.checks.options import check_fields, check_text, check_type
from moe_ops.checks.signature import did_you_mean

Shard = Literal["w1", "w2", "w3", "w13"]
Part = Literal["weight", "scale", "zero", "bias", "global_scale", "input", "g_idx", "shape"]

# What follows the name of a projection, behind "." or "_", and what the tensor then is.
PARTS: dict[str, Part] = {
    "": "weight",
    "weight": "weight",
    "qweight": "weight",  # GPTQ, AWQ
    "weight_packed": "weight",  # compressed-tensors
    "blocks": "weight",  # gpt-oss
    "weight_scale": "scale",  # compressed-tensors; ModelOpt: FP8 per tensor, FP4 per block
    "weight_scale_inv": "scale",  # fine-grained FP8: a multiplier, in spite of its name
    "scale": "scale",
    "scale_inv": "scale",
    "scales": "scale",
    "qzeros": "zero",
    "weight_zero_point": "zero",
    "bias": "bias",
    "weight_scale_2": "global_scale",  # ModelOpt FP4
    "weight_global_scale": "global_scale",
    "input_scale": "input",
    "activation_scale": "input",  # fine-grained FP8 with static inputs
    "input_global_scale": "input",
    "g_idx": "g_idx",
    "weight_g_idx": "g_idx",
    "weight_shape": "shape",
}
BASE_LAYER = re.compile(r"(?:(?<=\.)|^)base_layer\.")  # of peft, also one in another
# compressed-tensors divides by these where all others multiply.
RECIPROCALS = ("weight_global_scale", "input_global_scale")
# What the layer calls each part of the first weight and of the second.
PARAMETERS: dict[Part, tuple[str, str]] = {
    "input": ("x_scale", "h_scale"),
    **{
        p: (f"w13_{p}", f"w2_{p}")
        for p in ("weight", "scale", "zero", "bias", "global_scale", "g_idx")
    },
    "shape": ("w13_shape", "w2_shape"),
}
# Tensors of quantisers that are left when what can be read of them was put together.
FOREIGN = {
    "bitsandbytes": re.compile(
        r"\.(SCB|weight_format|absmax|quant_map|nested_absmax|quant_state\.bitsandbytes__\w+)$"
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a tensor of a checkpoint is to an MoE layer."""

    parameter: str  # of the layer
    shard: Shard
    expert: int | None  # None: all experts, on axis 0
    reciprocal: bool = False  # a scale that divides
    plain: bool = False  # a weight under a name that no quantiser gives to words or blocks


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a family of checkpoints names and lays out the experts of a layer.

    `projections` maps the names of projections to shards; "w13" is gate and up in one tensor, whose
    rows are gate then up, or alternate if `interleaved`. Experts are `<experts>.<id>.<projection>`
    or, all in one tensor, `<experts>.<projection>`; without `<experts>.` if that is empty. With
    `transposed` unquantised weights have their columns as outputs. `others` renames what else lies
    below the layer's prefix, longest match first, to the layer's parameters.
    """

    name: str
    projections: Mapping[str, Shard]
    experts: str = "experts"
    stacked: bool = False
    transposed: bool = False
    interleaved: bool = False
    others: Mapping[str, str] = field(
        default_factory=lambda: {
            "gate.e_score_correction_bias": "correction_bias",
            "shared_expert.": "shared_experts.",
            "shared_expert_gate.": "shared_experts.gate.",
        }
    )

    def __post_init__(self) -> None:
        check_fields(self)
        for field_name in ("projections", "others"):
            names = getattr(self, field_name)
            check_type(field_name, names, Mapping, "a mapping of names")
            for old, new in names.items():
                check_text(f"each name of {field_name}", old)
                check_text(f"what {field_name} maps {old!r} to", new)
        if not self.projections:
            raise ValueError("projections is empty; name those of gate, up and down")
        for name, shard in self.projections.items():
            if shard not in get_args(Shard):
                raise ValueError(
                    f"projections maps {name!r} to {shard!r}, which is no shard; choose one of "
                    f"{', '.join(get_args(Shard))}"
                )

    @cached_property
    def _pattern(self) -> str:
        experts = rf"{re.escape(self.experts)}\." if self.experts else ""
        expert = "" if self.stacked else r"(?P<expert>[0-9]{1,9})\."
        projections = "|".join(map(re.escape, self.projections))
        return rf"{experts}{expert}(?P<projection>{projections})(?P<part>$|[._].*)"

    def entry(self, name: str) -> Entry | str:
        """What the tensor called `name`, below the layer's prefix, is: an entry of the experts, or
        the layer's name of the parameter that it is. Adapters put `base_layer` into the names of
        what they adapt, which means nothing here.
        """
        name = BASE_LAYER.sub("", name)
        found = re.match(self._pattern, name)
        suffix = found["part"].lstrip("._") if found else ""
        part = PARTS.get(suffix)
        if found and part:
            shard = self.projections[found["projection"]]
            return Entry(
                parameter=PARAMETERS[part][shard == "w2"],
                shard=shard,
                expert=None if self.stacked else int(found["expert"]),
                reciprocal=suffix in RECIPROCALS,
                plain=suffix in ("", "weight"),
            )
        for old in sorted(self.others, key=len, reverse=True):
            if name.startswith(old):
                return self.others[old] + name.removeprefix(old)
        return name


W123 = Style(name="w123", projections={"w1": "w1", "w2": "w2", "w3": "w3"})
GATE_UP_DOWN = Style(
    name="gate_up_down", projections={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
)
# The same, or gate and up of an expert in one tensor.
EACH = Style(name="each", projections={**GATE_UP_DOWN.projections, "gate_up_proj": "w13"})
# Weights and their scales by the names of projections, scales of inputs by the others.
W4AFP8 = Style(name="w4afp8", projections={**GATE_UP_DOWN.projections, **W123.projections})
FUSED = Style(name="fused", projections={"gate_up_proj": "w13", "down_proj": "w2"}, stacked=True)
GPT_OSS = Style(
    name="gpt_oss",
    projections={"gate_up_proj": "w13", "down_proj": "w2"},
    stacked=True,
    transposed=True,
    interleaved=True,
    others={"router.": "gate."},
)

GGUF = Style(
    name="gguf",
    projections={
        "ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2",
        "ffn_gate_up_exps": "w13",
    },
    experts="",
    stacked=True,
    others={
        "ffn_gate_inp.": "gate.",
        "exp_probs_b.bias": "correction_bias",
        **{f"ffn_{p}_shexp.": f"shared_experts.{p}_proj." for p in ("gate", "up", "down")},
    },
)  # fmt: skip

# By the families that write them. In memory, and saved with save_original_format=False,
# transformers 5 has the experts of every family fused.
STYLES: dict[str, Style] = {
    "mixtral": W123,  # block_sparse_moe.experts.0.w1.weight
    "phi3.5": W123,
    "qwen": GATE_UP_DOWN,  # mlp.experts.0.gate_proj.weight
    "olmoe": GATE_UP_DOWN,
    "deepseek": GATE_UP_DOWN,
    "deepseek-w4afp8": W4AFP8,  # mlp.experts.0.gate_proj.weight, mlp.experts.0.w1.input_scale
    "glm": GATE_UP_DOWN,
    "transformers": FUSED,  # mlp.experts.gate_up_proj
    "gpt-oss": GPT_OSS,
    "gguf": GGUF,  # blk.3.ffn_gate_exps.weight, of every family
}


def style_of(style: str | Style) -> Style:
    """The style of a family. Raises ValueError, with the families, for an unknown one."""
    if isinstance(style, Style):
        return style
    check_type("style", style, str, "the name of a family or a Style")
    if style not in STYLES:
        raise ValueError(
            f"style {style!r} is unknown; choose one of {', '.join(STYLES)}, or give a Style"
            f"{did_you_mean(style, STYLES)}"
        )
    return STYLES[style]
