"""`experts` by TensorRT-LLM's generated kernels in FlashInfer: bfloat16 on Blackwell."""

from __future__ import annotations

from torch import Tensor

from moe_ops.backends.flashinfer import arguments, fits, kept, orders, package
from moe_ops.backends.flashinfer.fits import READS, Way
from moe_ops.backends.flashinfer.options import current
from moe_ops.backends.flashinfer.stored import SHUFFLED
from moe_ops.ops.experts import ExpertsCall, experts

NAME = "flashinfer_trtllm"
CAPABILITIES = ((10, 0), (10, 3))
WAYS = {("", ""): Way(capabilities=CAPABILITIES, hidden=128, width=128)}
MACHINE = package.Machine(capabilities=CAPABILITIES)
FITS = fits.Fits(machine=MACHINE, ways=WAYS)


def supports(call: ExpertsCall) -> str | None:
    return FITS.refusal(call)


@experts.backend(
    NAME,
    reads=READS,
    supports=supports,
    devices=("cuda",),
    priority=-1,
    layout=SHUFFLED,
)
def run(call: ExpertsCall) -> Tensor:
    """`experts` in one call of `trtllm_bf16_routed_moe`, with global ids and an offset."""
    if call.x_TD.shape[0] == 0:
        return call.x_TD.new_empty(call.x_TD.shape)
    routed, tokens = arguments.routed(call), kept.tokens_of(call.x_TD.shape[0], current())
    function = package.module("flashinfer.fused_moe").trtllm_bf16_routed_moe
    measuring = kept.tuning((NAME, call.w13_EFD.shape, tokens))
    runs = runs_of(call, tokens)
    with package.on(call.x_TD.device), runs.around(call.x_TD.shape[0], measuring):
        out_TD = call.x_TD.new_empty(call.x_TD.shape)
        function(
            topk_ids=(routed.ids_TK, routed.weights_TK),
            hidden_states=arguments.aligned(call.x_TD),
            gemm1_weights=orders.block_view(call.w13_EFD),
            gemm2_weights=orders.block_view(call.w2_EDI),
            num_experts=routed.experts,
            top_k=routed.ids_TK.shape[1],
            n_group=None,
            topk_group=None,
            intermediate_size=call.widths[1],
            local_expert_offset=routed.offset,
            local_num_experts=call.w13_EFD.shape[0],
            tune_max_num_tokens=tokens,
            activation_type=int(arguments.activation_type(call)),
            output=out_TD,
        )
    return out_TD


_RUNS: kept.Kept[kept.Runs] = kept.Kept("what TensorRT-LLM's kernels need")


def runs_of(call: ExpertsCall, tokens: int) -> kept.Runs:
    """How calls alike ran. They may begin in a capture, which makes nothing that is kept here."""
    key = (call.w13_EFD.shape, call.ids_TK.shape[1], call.x_TD.get_device(), tokens)
    return _RUNS.found(key) or (kept.Runs() if kept.capturing() else _RUNS.get(key, kept.Runs))


experts.needs(NAME, MACHINE.needs)
experts.remembers(NAME, aligned=True)
