"""`experts` by FlashInfer's CUTLASS kernels: 16-bit floats, float8, mxfp4 and nvfp4."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards

from moe_ops.backends.flashinfer import arguments, fits, kept, orders, package
from moe_ops.backends.flashinfer.fits import READS, Way
from moe_ops.backends.flashinfer.options import CURRENT, FlashInferOptions, current
from moe_ops.backends.flashinfer.stored import UP_GATE
from moe_ops.ops.experts import ExpertsCall, experts
from moe_ops.ops.quantize import quantize
from moe_ops.quant.scales import one_input_scale

NAME = "flashinfer_cutlass"
TENSOR, BLOCKS, GROUPS = "float8_e4m3fn:tensor", "float8_e4m3fn:128x128", "float8_e4m3fn:1x128"
HOPPER, BLACKWELL = ((9, 0),), ((10, 0), (10, 3), (12, 0), (12, 1))
EVERY = HOPPER + BLACKWELL
WAYS = {
    ("", ""): Way(capabilities=EVERY, dtypes=fits.HALVES, biases=True),
    (TENSOR, TENSOR): Way(
        capabilities=EVERY, dtypes=fits.HALVES, hidden=16, width=16, static_inputs=True,
        one_scale=True,
    ),
    (BLOCKS, GROUPS): Way(capabilities=HOPPER, hidden=128, width=128, kinds=("Swiglu",)),
    ("mxfp4", ""): Way(capabilities=HOPPER, hidden=128, width=128, biases=True),
    ("nvfp4", "nvfp4"): Way(capabilities=BLACKWELL, hidden=128, width=128, static_inputs=True),
}  # fmt: skip
MACHINE = package.Machine(capabilities=EVERY)
FITS = fits.Fits(machine=MACHINE, ways=WAYS)
# FlashInfer keeps one table of tactics by this number, the last one that it saw for the first time:
# with another number later calls would look up what was measured for other numbers of tokens.
MOST_TUNED = 8192  # its default
Scales = Callable[[ExpertsCall], list[Tensor]]


def supports(call: ExpertsCall) -> str | None:
    return FITS.refusal(call)


@experts.backend(
    NAME,
    reads=READS,
    supports=supports,
    devices=("cuda",),
    priority=-1,
    layout=UP_GATE,
)
def run(call: ExpertsCall) -> Tensor:
    """`experts` in one call of `cutlass_fused_moe`."""
    tokens = call.x_TD.shape[0]
    if tokens == 0:
        return torch.empty_like(call.x_TD)
    routed = arguments.routed(call, equal=True)
    launch = launch_of(call, routed)
    if tokens <= launch.runs.most and not current().autotune:
        return _run(call, routed, launch)
    with launch.runs.around(tokens, tuning(launch, tokens)):
        return _run(call, routed, launch)


def _run(call: ExpertsCall, routed: arguments.Routed, launch: Launch) -> Tensor:
    given, out_TD = tensors_of(call, routed), torch.empty_like(call.x_TD)
    given["output"], given["workspace_buffer"] = out_TD, workspace(launch, call.x_TD.device)
    package.call(launch.function, **launch.given, **given)
    return out_TD


# The parameters of the function behind `cutlass_fused_moe` that calls alike give by position, in a
# third of the time that names take, and those by name.
FIRST = (
    "output", "input", "token_selected_experts", "token_final_scales", "fc1_expert_weights",
    "fc1_expert_biases", "fc2_expert_weights", "fc2_expert_biases", "output_dtype", "quant_scales",
)  # fmt: skip
NAMED = {
    "activation_type", "use_fused_finalize", "tune_max_num_tokens", "ep_size", "ep_rank",
    "workspace_buffer",
}  # fmt: skip


def behind(device: torch.device) -> Callable[..., Any] | None:
    """The function that `cutlass_fused_moe` calls once it has found the GPU, made it the current
    one, and checked its result's shape: that takes longer than all that moe_ops does. None where
    the installed package has no such function with these parameters, or logs its calls. What it
    dumps of calls, once for each kind, it dumped of those before."""
    core, logs = (package.module(f"flashinfer.{n}") for n in ("fused_moe.core", "api_logging"))
    get, found = getattr(core, "get_cutlass_fused_moe_module", None), package.capability(device)
    if get is None or found is None or getattr(logs, "_API_LOG_LEVEL", None) != 0:
        return None
    function = getattr(get(f"{found[0] * 10 + found[1]}"), "cutlass_fused_moe", None)
    names = () if function is None else package.parameters(function)
    return function if names[: len(FIRST)] == FIRST and set(names) >= NAMED else None


def alike(call: ExpertsCall) -> Callable[..., Tensor] | None:
    """What runs calls like one that `run` ran: of 16-bit floats that need no conversion, what they
    have in common is found here, once. It allocates as Inductor's graphs do, in half the time."""
    c, device, (T, D) = call, call.x_TD.device, call.x_TD.shape
    if c.w_format or not arguments.as_taken(c) or current().autotune or T == 0:
        return None
    routed = arguments.routed(c, equal=True)
    if routed.ids_TK is not c.ids_TK:  # those here are no equal share
        return None
    launch, dtype, index = launch_of(c, routed), c.x_TD.dtype, c.x_TD.get_device()
    given, nbytes = launch.given, launch.nbytes
    with kept.plainly():
        function = behind(device)
    if function is None or nbytes is None:
        return None
    activation_type, fused = given["activation_type"], given["use_fused_finalize"]
    ep_size, ep_rank = given.get("ep_size", 1), given.get("ep_rank", 0)
    empty: Any = getattr(guards, f"_empty_strided_{device.type}")
    current_device = _current_device(device)

    def run_alike(
        x_TD: Tensor,
        weights_TK: Tensor,
        ids_TK: Tensor,
        w13_EFD: Tensor,
        w2_EDI: Tensor,
        b13_EF: Tensor | None = None,
        b2_ED: Tensor | None = None,
        *rest: Any,
        **named: Any,
    ) -> Tensor:
        if current_device() != index:  # where memory would lie
            layer = (w13_EFD, w2_EDI, b13_EF, b2_ED)
            return run(ExpertsCall(x_TD, weights_TK, ids_TK, *layer, *rest, **named))
        out_TD = empty((T, D), (D, 1), dtype)
        function(
            out_TD,
            x_TD,
            ids_TK,
            weights_TK,
            w13_EFD,
            b13_EF,
            w2_EDI,
            b2_ED,
            dtype,
            [],  # no scales
            workspace_buffer=empty((nbytes,), (1,), torch.uint8),
            # Written out, as to unpack a dict of them takes longer.
            activation_type=activation_type,
            use_fused_finalize=fused,
            tune_max_num_tokens=MOST_TUNED,
            ep_size=ep_size,
            ep_rank=ep_rank,
        )
        return out_TD

    return run_alike


def _current_device(device: torch.device) -> Callable[[], int]:
    """What tells the index of the current device of this type, without a wrapper's time."""
    return torch._C._cuda_getDevice if device.type == "cuda" else lambda: -1


def workspace(launch: Launch, device: torch.device) -> Tensor | None:
    """Bytes for one call, or None where FlashInfer has to allocate them. None are kept: the capture
    of a CUDA graph runs on a stream of its own, where nothing was warmed up, and whoever captures
    may own the pool of the warm-up too, as cudagraph trees do. torch's allocator, which FlashInfer
    calls too, knows the pools of graphs, and those of streams."""
    if launch.nbytes is None:
        return None
    return torch.empty(launch.nbytes, dtype=torch.uint8, device=device)


def tuning(launch: Launch, tokens: int) -> AbstractContextManager[None] | None:
    """What lets FlashInfer measure its tactics for so many tokens, if `kept.tuning` says so."""
    if not launch.tactics:
        return None
    of_tokens = package.found("flashinfer.fused_moe.utils", "map_to_hybrid_bucket")
    bucket = package.call(of_tokens, tokens, MOST_TUNED)
    return kept.tuning((NAME, launch.key), bucket)


def tensors_of(call: ExpertsCall, routed: arguments.Routed) -> dict[str, Any]:
    """The arguments of `cutlass_fused_moe` that are tensors, or go by them, but for where it
    writes."""
    c, formats = call, (call.w_format, call.x_format)
    w13, w2 = _weights(c)
    x_TD, scales = arguments.aligned(c.x_TD), SCALES.get(formats)
    if formats == (TENSOR, TENSOR):
        x_TD = quantize(x_TD, c.x_format, c.x_scale)[0]
    return {
        "input": x_TD,
        "token_selected_experts": routed.ids_TK,
        "token_final_scales": routed.weights_TK,
        "fc1_expert_weights": w13,
        "fc2_expert_weights": w2,
        "output_dtype": c.x_TD.dtype,
        "quant_scales": [] if scales is None else scales(c),
        "fc1_expert_biases": c.b13_EF,
        "fc2_expert_biases": c.b2_ED,
    }


@dataclass(frozen=True, slots=True)
class Launch:
    """What calls alike have in common: the function, those of its arguments that are no tensors,
    the bytes of its workspace if they are known before, whether it has tactics to choose from, and
    how it ran."""

    key: Hashable
    function: Callable[..., Any]
    given: dict[str, Any]
    nbytes: int | None
    tactics: bool
    runs: kept.Runs = field(default_factory=kept.Runs)


_LAUNCHES: kept.Kept[Launch] = kept.Kept("the size of a workspace")


def launch_of(call: ExpertsCall, routed: arguments.Routed) -> Launch:
    """FlashInfer is asked for the size once for each power of two of tokens."""
    c, x_TD, w13_EFD, options = call, call.x_TD, call.w13_EFD, current()
    key = (
        c.w_format, c.x_format, c.kind, c.gated, kept.tokens_of(x_TD.shape[0], options),
        w13_EFD.shape, c.ids_TK.shape[1], x_TD.dtype, x_TD.get_device(), routed.experts,
        routed.offset, options.other_bits,
    )  # fmt: skip
    return _LAUNCHES.found(key) or _LAUNCHES.get(key, lambda: _launch(key, c, routed, options))


def _launch(
    key: Hashable, call: ExpertsCall, routed: arguments.Routed, options: FlashInferOptions
) -> Launch:
    c, E, formats = call, call.w13_EFD.shape[0], (call.w_format, call.x_format)
    function = package.found("flashinfer.fused_moe", "cutlass_fused_moe")
    shared: dict[str, Any] = {
        "activation_type": arguments.activation_type(c),
        "use_fused_finalize": options.other_bits,
        **FLAGS.get(formats, {}),
    }
    if routed.experts != E:
        shared |= {"ep_size": routed.experts // E, "ep_rank": routed.offset // E}
    given = shared | TACTICS.get(formats, {"tune_max_num_tokens": MOST_TUNED})
    tactics = formats not in TACTICS
    if formats in GROWING:
        return Launch(key, function, given, None, tactics)
    tokens = kept.tokens_of(c.x_TD.shape[0], options)
    nbytes = package.call(
        package.found("flashinfer.fused_moe", "cutlass_fused_moe_workspace_size"),
        *(tokens, *c.widths, routed.experts, c.ids_TK.shape[1]),
        x_dtype=c.w13_EFD.dtype if formats == (TENSOR, TENSOR) else c.x_TD.dtype,
        weight_dtype=_weights(c)[0].dtype,
        output_dtype=c.x_TD.dtype,
        device=c.x_TD.device,
        **shared,
    )
    return Launch(key, function, given, int(nbytes), tactics)


FLAGS = {
    (BLOCKS, GROUPS): {"use_deepseek_fp8_block_scale": True},
    ("mxfp4", ""): {"use_w4_group_scaling": True},
}
# Its kernels of blocks have no tactics to choose from, so that the table is not even looked at.
TACTICS = {(BLOCKS, GROUPS): {"profile_ids": [-1, -1]}}
# Its kernels of blocks want, in every call, as many bytes as the most rows take that any call of
# the process had, of other layers too: a size that was asked for before is soon too small.
GROWING = {(BLOCKS, GROUPS)}


def _weights(call: ExpertsCall) -> tuple[Tensor, Tensor]:
    """The codes as the types by which FlashInfer tells its formats."""
    w13, w2 = call.w13_EFD, call.w2_EDI
    if call.w_format == "nvfp4":
        return w13.view(torch.int64), w2.view(torch.int64)
    return w13, w2


def float8_scales(call: ExpertsCall) -> list[Tensor]:
    """Factors of both products, with the scale of their inputs between them and at the end. Made
    anew by every call, as scales may be written to in ways that no counter tells."""
    from moe_ops.kernels.triton.replay import replay
    from moe_ops.kernels.triton.static_factors import static_factors

    c = call
    assert c.x_scale is not None and c.h_scale is not None
    scales = (c.x_scale, c.h_scale, c.w13_scale_EFG, c.w2_scale_EDG)
    first_E, second_E, inverse = replay(static_factors, scales, ())
    return [first_E, inverse, second_E, c.x_scale.reshape(())]


def block_scales(call: ExpertsCall) -> list[Tensor]:
    assert call.w13_scale_EFG is not None and call.w2_scale_EDG is not None
    return [call.w13_scale_EFG, call.w2_scale_EDG]


def mxfp4_scales(call: ExpertsCall) -> list[Tensor]:
    return [orders.folded_view(scale) for scale in block_scales(call)]


def nvfp4_scales(call: ExpertsCall) -> list[Tensor]:
    """Three tensors for each of the two products: the reciprocal of the input's scale, the block
    scales, and the factor of each expert."""
    c = call
    assert c.x_scale is not None and c.global_scale13_E is not None
    assert c.h_scale is not None and c.global_scale2_E is not None
    live = (c.x_scale, c.h_scale, c.global_scale13_E, c.global_scale2_E)
    return six_scales(live, block_scales(c))


def six_scales(live: tuple[Tensor, ...], blocks: Sequence[Tensor]) -> list[Tensor]:
    """The scales of nvfp4 in the order in which CUTLASS takes them, of those of both inputs and of
    both products."""
    x_scale, h_scale, global_scale13_E, global_scale2_E = live
    found = []
    inputs = ((x_scale, global_scale13_E), (h_scale, global_scale2_E))
    for (scale, global_scale_E), of_blocks in zip(inputs, blocks, strict=True):
        one, factors_E = one_input_scale(scale, global_scale_E)
        found += [one.reciprocal().reshape(()), of_blocks.view(torch.int32), factors_E]
    return found


SCALES: dict[tuple[str, str], Scales] = {
    (TENSOR, TENSOR): float8_scales,
    (BLOCKS, GROUPS): block_scales,
    ("mxfp4", ""): mxfp4_scales,
    ("nvfp4", "nvfp4"): nvfp4_scales,
}


experts.needs(NAME, MACHINE.needs)
experts.rounds(NAME, FITS.multiples)
experts.remembers(NAME, CURRENT, alike=alike, aligned=True)
