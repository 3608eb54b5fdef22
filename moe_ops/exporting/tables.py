"""`decompositions`: the ops in operators that other compilers and runtimes have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from moe_ops.checks.options import check_flag, check_text
from moe_ops.checks.signature import did_you_mean
from moe_ops.exporting import products, rows
from moe_ops.exporting.codes import cannot, require_makeable
from moe_ops.exporting.nodes import Nodes
from moe_ops.ops.experts_batched import ExpertsBatchedCall, in_rows
from moe_ops.ops.quantize import QuantizeCall, quantize
from moe_ops.registry.spec import DECODE_OPS, OPS, Op

Formula = Callable[[Any], Any]
Table = dict[OpOverload, Callable[..., Any]]

TARGETS = ("aten", "portable", "onnx", "ort")
# They send rows to other processes, which the file of a model in one process does not hold.
OVER_RANKS = ("dispatch_tokens", "combine_tokens", "experts_over_ranks", "sum_ranks")
# Gradients consist of them. Those that run files of models do not train.
OF_TRAINING = (
    "activate_backward", "expert_wgrad", "experts_saving", "experts_backward",
    "experts_accumulating",
    "experts_adapted_saving", "experts_adapted_backward",
)  # fmt: skip


def decompositions(target: str, *, assume_positive: bool = False) -> Table:
    """The ops of moe_ops in operators that `target` has: a table for torch's decompositions.

        table = moe_ops.decompositions("portable")
        program = torch.export.export(model, args).run_decompositions(table)

    Each function takes the arguments of its op, and can be traced for numbers of tokens that vary.

    aten       the definitions, in all formats. That of `expert_gemm` gathers a weight for each row,
               which a compiler fuses into the product, and which is large if run as it is.
    portable   operators that ONNX, OpenVINO and ExecuTorch have too: no stable sort, no search, no
               bits of floats. Each expert's product is taken of all tokens, unless their number
               is known and few: E / K times the work, and no weight for each row.
    onnx       what torch.onnx.export translates: today the same.
    ort        nodes of ONNX Runtime, com.microsoft MoE and QMoE, for `experts` and `moe`, else as
               onnx. Their router has a softmax, so no weight may be below 0, which is proven of
               the graph that makes them; of weights that the graph does not make
               `assume_positive` says so.

    Raises ValueError for an unknown target, and for `assume_positive` with another than "ort". What
    a target cannot say raises NotImplementedError when it is met, with the op, its argument and the
    target to take.
    """
    check_text("target", target)
    check_flag("assume_positive", assume_positive)
    if target not in TARGETS:
        raise ValueError(
            f"target={target!r} is unknown; choose one of {', '.join(TARGETS)}"
            f"{did_you_mean(target, TARGETS)}"
        )
    if assume_positive and target != "ort":
        raise ValueError(f"assume_positive is for the target 'ort', got {target!r}; leave it out")
    formulas: dict[str, Formula] = {}
    if target != "aten":
        formulas |= PORTABLE
    if target == "ort":
        formulas["experts"] = Nodes(assume_positive=assume_positive).experts
    every = OPS | DECODE_OPS
    # An op that writes its arguments has no value that could stand for it.
    table: Table = {
        op.overload: _of_record(op, formulas.get(name, op.body))
        for name, op in every.items()
        if not op.arguments.mutated
    }
    return table | {op.planned: _refuses_plans(name) for name, op in every.items()}


def _of_record(op: Op, formula: Formula) -> Callable[..., Any]:
    """A formula of the op's record as a function of its arguments."""
    return lambda *args, **kwargs: formula(op.call(*args, **kwargs))


def _refuses_plans(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"moe_ops.{name} is to be batch invariant in this program, which no other runtime "
            "promises; export a layer without batch_invariant, or run the program as it is"
        )

    return refuse


def _quantize(call: QuantizeCall) -> tuple[Tensor, Tensor]:
    require_makeable("quantize", "format", call.format)
    done: tuple[Tensor, Tensor] = quantize.body(call)
    return done


def _refuses_ranks(name: str) -> Formula:
    def refuse(call: Any) -> Any:
        why = "sends rows to other ranks, which a file for one process cannot"
        raise cannot(name, "group", getattr(call, "group", ""), why, "aten")

    return refuse


def _refuses_training(name: str) -> Formula:
    def refuse(call: Any) -> Any:
        raise NotImplementedError(
            f"moe_ops.{name} is a part of gradients, which this target does not train by; export "
            "the model under torch.no_grad(), or decompose by decompositions('aten')"
        )

    return refuse


def _refuses_adapters(call: Any) -> Any:
    raise NotImplementedError(
        "moe_ops.experts_adapted keeps weights and adapters apart, for which this target has no "
        "formula; merge the adapter into the weights, or decompose by decompositions('aten')"
    )


def _batched(call: ExpertsBatchedCall) -> Tensor:
    out_TD: Tensor = products.experts(in_rows(call))
    return out_TD.view(*call.batches.x_EMD.shape[:2], out_TD.shape[1])


PORTABLE: dict[str, Formula] = {
    "quantize": _quantize,
    "dispatch": rows.dispatch,
    "expert_gemm": products.expert_gemm,
    "combine": rows.combine,
    "quantized_linears": products.quantized_linears,
    "experts": products.experts,
    "experts_batched": _batched,
    "experts_adapted": _refuses_adapters,
    **{name: _refuses_ranks(name) for name in OVER_RANKS},
    **{name: _refuses_training(name) for name in OF_TRAINING},
}
