"""The Mixture-of-Experts layer as a module: this rank's share of its weights, and its forward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moe_ops.checks.shapes import check_float, check_size
from moe_ops.layer import invariant
from moe_ops.layer.checks import check_arguments, check_input
from moe_ops.layer.chosen import chosen
from moe_ops.layer.exchange import Exchange, agreed_rows
from moe_ops.layer.operands import operands_of
from moe_ops.layer.options import Routing
from moe_ops.layer.padding import Asked
from moe_ops.layer.parts import (
    ALONE,
    Combination,
    Reduction,
    counted_ids,
    missing_exchange,
    reduction_of,
    result_over_ranks,
    with_fused,
)
from moe_ops.layer.records import (
    Fields,
    Latent,
    OwnTokens,
    Padding,
    Placement,
    Records,
    SharedExperts,
)
from moe_ops.layer.run import Ranks, Routed, run_here, run_over_ranks
from moe_ops.layer.tensors import (
    CODED,
    EXPERT_NAMES,
    INPUT_SCALES,
    PER_EXPERT,
    STATE,
    LayerSizes,
    check_fits,
    layer_buffers,
    own_part,
    tensor_specs,
)
from moe_ops.ops import expert_loads
from moe_ops.ops.activate import Activation, check_activation
from moe_ops.ops.linear_layers import apply_linear
from moe_ops.parallel.config import ParallelConfig
from moe_ops.parallel.expert_map import LINEAR, place
from moe_ops.parallel.replicas import ExpertReplicas, choose_replicas
from moe_ops.prepared import HoldsExperts, Stored
from moe_ops.quant.config import QuantConfig
from moe_ops.quant.module import HoldsCodes
from moe_ops.registry.gradients import in_backward

if TYPE_CHECKING:
    from typing import Unpack  # Python 3.11

SILU = Activation(kind="silu")


class MoELayer(HoldsExperts, HoldsCodes):
    """Run each token through its top_k experts: out = sum over the ranks of their forwards.

        w, e = route(logits)            y_t = sum_k w_tk W2_e act(W13_e x_t + b13_e) + w_tk b2_e

    A layer holds the share of one rank: with tensor parallelism `intermediate_size / tp` rows of
    the gate and of the up half of W13 and as many columns of W2, of every expert; with expert
    parallelism whole experts, as `placement` says. Weights start random, or as zeros where they are
    quantised; `moe_ops.weights` loads a checkpoint. What a rank is given, and returns:

        tokens="replicated"  all tokens, and its part of the sum, unless reduce_results adds these
        OwnTokens(...)       its own tokens, and all of their result: ranks send them to each other
                             by `parallel.collective`. Every rank calls the layer
        None                 the former; forward raises NotImplementedError where `parallel` says
                             that ranks start with tokens of their own (dp, pcp, sp above 1) or that
                             these go all-to-all: `route` and `run_experts` suit a caller's exchange

    Parameters, each absent (None) where a layer has none, with E = sizes.E slots here and the other
    letters of `sizes`:
        w13_weight [E, F, D], w2_weight [E, D, I]   rows gate then up; alternating if the activation
                                                    is interleaved; packed along the last axis
        w13_bias [E, F], w2_bias [E, D]             w2_bias on the first tensor-parallel rank alone
        w13_scale, w2_scale, w13_zero, w2_zero      [E, groups of rows, groups of columns]
        w13_global_scale [E] or [E, 2], w2_global_scale [E]  of nvfp4; two are of gate and of up
        x_scale, h_scale [1] or [E]                 static scales of the inputs of both products
        input_order [hidden_size], or [E, hidden_size]  which column of the input comes where
        correction_bias [num_experts]               of the router
        gate                                        the router's linear, if internal_gate

    num_experts, hidden_size, intermediate_size: of the whole layer. routing: see `Routing`.
    activation: an `Activation`, which also says whether experts are gated. bias: of both products.
    internal_gate: True for an nn.Linear without bias, from hidden_size or the in_features of
    routed_input_transform, or a module from tokens to logits.

    shared_experts: a module, a number of fused ones, or `SharedExperts` with either. latent: see
    `Latent`. placement: `Placement`, or as `place` has it. padding: `Padding`, or the backend for
    which sizes are rounded up. Each field of these records, and of `OwnTokens` beside tokens="own",
    may be given as a keyword instead.

    quant: None, the name of a scheme with one format, the format of weights, or a `QuantConfig`. A
    quantised input whose scale is dynamic and covers the whole width (or all tokens) is scaled by
    each rank for its own share, so its sum over ranks is off by the rounding of that input; static
    scales and groups of columns are exact.

    parallel: see `ParallelConfig`. Where experts are balanced, `replicas` says where each is,
    `expert_tensors` what moves along; `loads` [num_experts] and `physical_loads` count the pairs of
    a token and an expert by what each computes and by where it lies. Of a call's tokens the first
    counted_part[0] / counted_part[1] count: all, but where a graph pads them. Those that activation
    checkpointing runs again in a backward do not.

    reduce_results: the name of a process group to all-reduce over, True for the default group,
    which has to be of the ranks of `parallel`, a function that reduces a tensor, or None to return
    this rank's part. Of one rank True adds nothing.
    batch_invariant: give a token the same bits whatever the others are; see docs/INVARIANCE.md.

    Raises ValueError or TypeError, saying what to do, if the arguments do not fit together.
    """

    w13_weight: nn.Parameter
    w2_weight: nn.Parameter
    w13_scale: nn.Parameter | None
    w2_scale: nn.Parameter | None
    w13_zero: nn.Parameter | None
    w2_zero: nn.Parameter | None
    w13_global_scale: nn.Parameter | None
    w2_global_scale: nn.Parameter | None
    w13_bias: nn.Parameter | None
    w2_bias: nn.Parameter | None
    x_scale: nn.Parameter | None
    h_scale: nn.Parameter | None
    correction_bias: nn.Parameter | None
    expert_map: Tensor | None
    rank_of_P: Tensor
    slot_of_P: Tensor
    loads: Tensor | None
    physical_loads: Tensor | None
    counted_part: Tensor | None
    physical_to_logical: Tensor
    logical_to_physical: Tensor
    replica_counts: Tensor | None
    input_order: Tensor | None
    expert_names = EXPERT_NAMES

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        routing: Routing = Routing(),  # noqa: B008  frozen
        activation: Activation = SILU,
        bias: bool = False,
        internal_gate: bool | nn.Module = False,
        shared_experts: nn.Module | int | SharedExperts = 0,
        latent: Latent | None = None,
        quant: str | QuantConfig | None = None,
        parallel: ParallelConfig = ParallelConfig(),  # noqa: B008  frozen
        tokens: str | OwnTokens | None = None,
        placement: str | Placement = LINEAR,
        reduce_results: Reduction | bool = None,
        padding: str | Padding | None = None,
        batch_invariant: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **by_field: Unpack[Fields],
    ) -> None:
        told = Records.of(locals(), by_field)  # nothing but the arguments is local yet
        check_arguments(told.given)
        told.given["reduce_results"] = reduction_of(reduce_results, parallel)
        exchange = Exchange.of(told.given)
        super().__init__()
        self._stored, self.quant = Stored(), QuantConfig.of(quant)
        self.num_experts, self.top_k = num_experts, top_k
        self.routing, self.activation, self.parallel = routing, activation, parallel
        self.reduce_results: Reduction = told.given["reduce_results"]
        self.exchange, self.batch_invariant = exchange, batch_invariant
        self.shared_reduction, self.separate = told.shared.shared_reduction, told.shared.separate
        self.tokens, self.max_num_tokens = told.given["tokens"], told.given["max_num_tokens"]
        self._missing_exchange = missing_exchange(parallel, self.tokens)
        shared, self.beside = told.shared.shared_experts, told.shared.beside
        self.placement = place(
            num_experts,
            parallel,
            placement=told.placement.placement,
            redundant=told.placement.redundant_experts,
            shared=shared if isinstance(shared, int) else 0,
            num_groups=routing.n_group,
            balanced=told.placement.balanced,
        )
        self.expert_offset = self.placement.offset  # Dynamo cannot trace what looks it up
        dtype = torch.get_default_dtype() if dtype is None else dtype
        self._asked = Asked.of(told.padding, self.quant, dtype, exchange)
        self.sizes = LayerSizes.of(
            slots=self.placement.num_slots,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            gated=activation.gated,
            tp_size=parallel.tp_size,
            tp_rank=parallel.tp_rank,
            **self._asked.multiples,
        )
        self._check()
        self._specs = tensor_specs(
            self.sizes,
            dtype=dtype,
            formats=self.quant,
            bias=bias,
            holds_w2_bias=parallel.tp_rank == 0,
            num_biased=num_experts if routing.correction_bias else 0,
        )
        for name, spec in self._specs.items():
            self.register_parameter(name, None if spec is None else spec.make(device))
        buffers = (self.placement, self.sizes, self.quant, exchange is not None)
        self._first_buffers = partial(layer_buffers, *buffers)
        for name, t in self._first_buffers().items():
            moved = None if t is None else t.to(device or torch.get_default_device())
            self.register_buffer(name, moved, persistent=name in STATE)
        if internal_gate is True:
            width = getattr(told.latent.routed_input_transform, "in_features", hidden_size)
            internal_gate = nn.Linear(width, num_experts, bias=False, dtype=dtype, device=device)
        self.gate = internal_gate if isinstance(internal_gate, nn.Module) else None
        self.shared_experts = None if isinstance(shared, int) else shared
        self.routed_input_transform = told.latent.routed_input_transform
        self.routed_output_transform = told.latent.routed_output_transform
        Combination.of(self).check(parallel.size, exchange is not None and not exchange.tp_group)
        self.reset_parameters()

    def _check(self) -> None:
        """Raise ValueError or TypeError, saying what to do, unless the options fit together."""
        self.routing.check(self.num_experts, self.top_k, self.placement.shared)
        check_activation(self.activation)
        if self.quant is not None:
            check_fits(self.quant, self.sizes, self.parallel.tp_size)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start anew: weights and biases uniform in +- 1 / sqrt(fan in), everything quantised zero.

        What sizes were rounded up by is zero, and replicas are as at first. Call it after
        `to_empty`, which writes nothing; a gate and shared experts reset themselves.
        """
        for name, first in self._first_buffers().items():
            if first is not None:
                self.get_buffer(name).copy_(first)
        for name, spec in self._specs.items():
            if spec is None:
                continue
            t = self.get_parameter(name)
            spec.reset(t)
            if spec.fan_in is not None:
                bound = spec.fan_in**-0.5
                own_part(name, t, self.sizes, self.activation).uniform_(-bound, bound)

    def forward(
        self, x: Tensor, logits: Tensor | None = None, rows: int | None = None
    ) -> Tensor | tuple[Tensor, ...]:
        """This rank's part of the sum, or all of it with reduce_results or for its own tokens.

        x: [..., hidden_size] in the weights' dtype, any number of tokens, none too; logits: [...,
        num_experts], left out with an internal gate. The result has x's dtype and leading axes.
        rows: the most tokens that a rank has in this call, agreed among ranks that exchange them,
        of which each sends no more than max_num_tokens at once: more go in ceil(rows /
        max_num_tokens) parts, one after the other, and the result is as of one. Without rows an
        eager call asks all ranks, for which the host waits, and then sends for max_num_tokens at
        least; one that is compiled or captured asks nobody, and raises for more than these.
        Raises ValueError or TypeError as the ops do, and NotImplementedError where ranks would have
        to exchange tokens.
        """
        if self._missing_exchange is not None:
            raise NotImplementedError(self._missing_exchange)
        invariant.require(self)
        check_input(x, logits, self.gate)
        flat = x.dim() == 2
        x_TD = x if flat else x.reshape(-1, x.shape[-1])
        weights_TK, ids_TK = self.route(x_TD, self._logits(x_TD, logits))
        transform = self.routed_input_transform
        routed_TD = x_TD
        if transform is not None:
            routed_TD = apply_linear(transform, x_TD, self.batch_invariant)
        if self.routing.weight_on_input:
            routed_TD = routed_TD * weights_TK.to(routed_TD.dtype)
            weights_TK = torch.ones_like(weights_TK)
        routed, how = Routed(routed_TD, weights_TK, ids_TK), Combination.of(self)
        if self.exchange is None:
            parts = invariant.result_here(self, how, x_TD, routed)
        else:
            check_size("x", routed_TD, 1, self.sizes.hidden_size, "the layer's hidden_size")
            ranks = Ranks(self.exchange, self.rank_of_P, self.slot_of_P)
            agreed = agreed_rows(rows, routed_TD, self.exchange)
            run = partial(run_over_ranks, operands_of(self), ranks, agreed, routed)
            parts = result_over_ranks(how, self.exchange.tp_group, x_TD, run)
        if self.loads is not None and not in_backward():  # after what may raise
            assert self.counted_part is not None and self.physical_loads is not None
            counted_TK = counted_ids(ids_TK, self.counted_part)
            counted_P = expert_loads(counted_TK, self.physical_loads.shape[0])
            self.physical_loads.add_(counted_P)
            self.loads.index_add_(0, self.physical_to_logical, counted_P)
        if not flat:
            parts = tuple([part.reshape(*x.shape[:-1], part.shape[-1]) for part in parts])
        return parts if self.separate else parts[0]

    def _logits(self, x_TD: Tensor, logits: Tensor | None) -> Tensor:
        if logits is not None:
            return logits.reshape(-1, logits.shape[-1])
        assert self.gate is not None  # as `check_input` says
        return apply_linear(self.gate, x_TD, self.batch_invariant)

    def route(self, x_TD: Tensor, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts. Returns (weights_TK, ids_TK) with global ids of physical experts, K =
        top_k and then one for each fused shared expert.

        Fused shared experts have the weight 1, and on ranks that do not serve a token the id -1.
        """
        check_float("logits_TE", logits_TE, 2)
        check_size("logits_TE", logits_TE, 1, self.num_experts, "the experts of the layer")
        weights_TK, ids_TK = self.choose(x_TD, logits_TE)
        if self.replica_counts is not None:
            # Ranks that are given the same tokens choose alike.
            start = 0 if self.exchange is None else self.parallel.rank // self.exchange.sharers
            ids_TK = choose_replicas(ids_TK, self.logical_to_physical, self.replica_counts, start)
        if not self.placement.shared:
            return weights_TK, ids_TK
        return with_fused(weights_TK, ids_TK, self.placement, own=self.exchange is not None)

    def choose(self, x_TD: Tensor, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and ids [T, top_k] that the routing chooses, whoever serves them."""
        return chosen(self, x_TD, logits_TE)

    def run_experts(self, x_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """The weighted sum of the experts of this rank, given what `route` returned. [T, D]."""
        check_size("x", x_TD, 1, self.sizes.hidden_size, "the layer's hidden_size")
        return run_here(operands_of(self), Routed(x_TD, weights_TK, ids_TK), self.expert_map)

    @property
    def replicas(self) -> ExpertReplicas | None:
        """Which logical expert each physical one computes, in the layer's buffers; `update_` writes
        there. None where each computes itself.
        """
        if self.replica_counts is None:
            return None
        return ExpertReplicas(
            self.physical_to_logical, self.logical_to_physical, self.replica_counts
        )

    @property
    def padding(self) -> str:
        """Which sizes are rounded up, to what, and who asked for it; "" if none is."""
        rounded, by = self.sizes.rounded, "; ".join(self._asked.by)
        return f"{rounded}: {by}" if rounded and by else rounded

    def coded(self) -> tuple[str, ...]:
        """The names of what casts and loads do not convert: codes, and scales that go with them."""
        return () if self.quant is None else CODED

    def coded_as(self) -> str:
        """The format of the weights; "" if they are floats."""
        return "" if self.quant is None else self.quant.format.name

    def expert_tensors(self) -> dict[str, Tensor]:
        """The tensors with one entry per slot on axis 0, by name: what moves with an expert."""
        names, quant = [*PER_EXPERT], self.quant
        if quant is not None:
            names += INPUT_SCALES if quant.per_expert_inputs else ()
            names += ("input_order",) if quant.per_expert_order else ()
        found = ((name, getattr(self, name)) for name in names)
        return {name: t.detach() for name, t in found if t is not None}

    def extra_repr(self) -> str:
        """Experts, routing, sizes, formats, this rank's share, and the bytes of it."""
        act, shape = self.activation, self.sizes.describe(self.parallel.tp_size)
        held = sum(t.nbytes for n in self._specs if (t := getattr(self, n)) is not None)
        kind = act.kind + ", gated" * act.gated + ", bias" * (self.w13_bias is not None)
        dtype = str(self.w13_weight.dtype).removeprefix("torch.")
        summed = self.reduce_results not in (None, ALONE)
        result = ", reduced over the ranks" if summed else ""
        if self.exchange is not None:
            result = f", each with up to {self.exchange.most} tokens of its own at once"
        return "\n".join(
            (
                f"top {self.top_k} of {self.num_experts} experts: {self.routing}",
                f"{shape}, {kind}",
                f"weights: {self.quant or dtype}, {held / 2**20:.1f} MiB on this rank",
                f"{self.parallel.describe()}{result}",
                self.placement.describe(),
                *["batch_invariant=True"] * self.batch_invariant,
            )
        )
