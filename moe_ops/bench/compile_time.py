"""What our passes add to the time of compiling a model, and how that grows with its layers."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch._inductor import config

from moe_ops.ops import experts
from moe_ops.passes.inductor.compiled import inductor_options
from moe_ops.passes.inductor.pipeline import HOOK, Pipeline
from moe_ops.testing import Case, make_layer

TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Seconds of one cold compilation, those of the passes counted in."""

    layers: int
    nodes: int  # of the graph that the passes are given
    compile_s: float
    passes_s: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.passes_s.values())

    @property
    def share(self) -> float:
        return self.total_s / self.compile_s


def measure(layers: int) -> Share:
    """Compile a Qwen3-MoE model of tiny widths with nothing cached."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=64, num_experts=8,
        num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    build_kernels()
    model = Qwen3MoeForCausalLM(sizes).to(torch.bfloat16).eval().requires_grad_(False)
    torch._dynamo.reset()
    options = inductor_options()
    pipeline: Pipeline = options[HOOK]
    compiled = torch.compile(model, options=options)
    with torch.inference_mode(), config.patch(force_disable_caches=True):
        start = time.perf_counter()
        compiled(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False)
        seconds = time.perf_counter() - start
    (run,) = pipeline.runs
    lifted = {done.name: done.rewrites for done in run.passes}
    if lifted["fuse_moe"] != layers:
        raise AssertionError(f"{lifted} of {layers} layers: not timing what is wrong")
    times = {done.name: done.seconds for done in run.passes}
    return Share(layers=layers, nodes=run.nodes_before, compile_s=seconds, passes_s=times)


def build_kernels() -> None:
    """Let the CPU backend build its kernels, once for a machine, before anything is timed."""
    layer = make_layer(Case(name="tiny", T=1, E=2, K=1, D=32, I=16), torch.bfloat16)
    experts(layer.x_TD, layer.weights_TK, layer.ids_TK, layer.w13_EFD, layer.w2_EDI)


def table(found: list[Share]) -> str:
    names = list(found[0].passes_s)
    head = f"{'layers':>28}" + "".join(f"{share.layers:>10}" for share in found)
    rows = [
        ("nodes in the graph", [f"{s.nodes}" for s in found]),
        ("compilation, s", [f"{s.compile_s:.1f}" for s in found]),
        *((f"{name}, ms", [f"{1e3 * s.passes_s[name]:.1f}" for s in found]) for name in names),
        ("all passes, ms", [f"{1e3 * s.total_s:.1f}" for s in found]),
        ("all passes, ms a layer", [f"{1e3 * s.total_s / s.layers:.2f}" for s in found]),
        ("share of compilation", [f"{100 * s.share:.1f} %" for s in found]),
    ]
    lines = [f"{name:>28}" + "".join(f"{cell:>10}" for cell in cells) for name, cells in rows]
    return "\n".join([head, *lines])
