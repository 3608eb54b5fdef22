"""Where the time of a step of `generate` goes: kernels by their parts, and what they read."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Names of GPU kernels, the first that fits; Inductor's own are named after what they compute.
PARTS = {
    "MoE": r"(tiny|rows|one|few)_(up|down)|_grouped|grouped_mm|route|sort_(kernel|beside_tokens)"
    r"|count_kernel|add_up_kernel|place_kernel|sum_kernel|tile_map|moe",
    "attention": r"softmax|attention|fmha|flash|bmm|index_copy|index_put|scatter|one_query|rope",
    "rest": r"",
}
STEPS = 16  # that are profiled, after the prompt


def seconds(call: Callable[[], Any]) -> float:
    """The wall time of a call, its work on a GPU included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def kv_bytes(config: Any, batch: int, length: int) -> int:
    """Keys and values of so many sequences of that length."""
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * size
    return batch * length * per_token * 2


def tensors_of(model: Any) -> list[tuple[str, Tensor]]:
    """Weights, scales of quantised ones included."""
    return [*model.named_parameters(), *model.named_buffers()]


def step_bytes(model: Any, batch: int, length: int) -> dict[str, float]:
    """What a step reads at least: the weights of the experts that its tokens choose, if all are as
    likely; keys and values so far; all other weights."""
    config, read = model.config, dict.fromkeys(PARTS, 0.0)
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    chosen = 1 - (1 - config.num_experts_per_tok / experts) ** batch
    for name, weight in tensors_of(model):
        if ".experts." in name:
            read["MoE"] += chosen * weight.nbytes
        elif weight is not model.get_input_embeddings().weight:
            read["rest"] += weight.nbytes
    read["attention"] = kv_bytes(config, batch, length)
    return read


def breakdown(model: Any, ids: Tensor) -> dict[str, Any]:
    """Return what one step is made of: the ms that kernels of each part take, the least bytes that
    they read, the kernels that take most, and the ms of the prompt's kernels."""
    from torch.profiler import ProfilerActivity, profile

    totals: list[Counter[str]] = []
    for n in (1, 1 + STEPS):  # the difference is steps alone
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            seconds(lambda n=n: model.generate(ids, max_new_tokens=n, do_sample=False))  # type: ignore[misc]
        totals.append(Counter())
        for event in profiler.key_averages():
            totals[-1][event.key] += event.self_device_time_total / 1e3 / STEPS
    totals[1].subtract(totals[0])
    parts = dict.fromkeys(PARTS, 0.0)
    for kernel, ms in totals[1].items():
        part = next(p for p, names in PARTS.items() if re.search(names, kernel))
        parts[part] += ms
    batch, prompt = ids.shape
    kernels = [(kernel, ms) for kernel, ms in totals[1].most_common(20) if ms > 0]
    return {
        "ms": parts,
        "bytes": step_bytes(model, batch, prompt + STEPS // 2),
        "kernels": kernels,
        "prompt_ms": sum(totals[0].values()) * STEPS,
    }


def tables_of_steps(steps: dict[int, dict[str, Any]]) -> str:
    lines = []
    for batch, step in steps.items():
        lines.append(f"batch {batch}, ms that kernels of a step take")
        for part, ms in step["ms"].items():
            floor = step["floor_ms"][part]
            share = f" ({floor / ms:.0%})" if ms else ""
            lines.append(f"    {part:<72}{ms:>9.3f}, to read its bytes {floor:.3f}{share}")
        lines += [f"    {kernel[:70]:<72}{ms:>9.3f}" for kernel, ms in step["kernels"][:10]]
        lines.append(f"    {'all kernels of the prompt':<72}{step['prompt_ms']:>9.3f}")
    return "\n".join(lines)
