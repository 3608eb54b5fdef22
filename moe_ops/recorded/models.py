"""`record_routing` and `replay_routing`: contexts in which a model's routings are written down, or
are those that were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_ops.checks.options import check_flag, check_int, check_type
from moe_ops.installed import inside_of_peft, is_transformers_model, require_transformers
from moe_ops.interop.told import TOLD, Told
from moe_ops.recorded import bare
from moe_ops.recorded.bare import GIVEN_IDS, RING_IDS
from moe_ops.recorded.ring import Rings
from moe_ops.recorded.routing import MOST_EXPERTS, RecordedRouting, called
from moe_ops.recorded.watch import watched
from moe_ops.recorded.windows import Windows

if TYPE_CHECKING:
    from moe_ops.hf.routed import Routed

    Layer = Routed | bare.Bare

TOKENS = 16384  # rows of a ring, unless said otherwise


class Recording:
    """The routings of a model that are being recorded."""

    def __init__(self, rings: Rings) -> None:
        self._rings = rings

    def take(self) -> RecordedRouting:
        """What was recorded since the last time, of the calls that were made. The host waits for
        the device. It can be called after the context, too."""
        return self._rings.take()

    @property
    def device_bytes(self) -> int:
        """The memory of the device that recording holds, however many calls are made."""
        return self._rings.nbytes


class Replay:
    """The record that a model's routers take."""

    def __init__(self, windows: Windows, layers: list[Layer]) -> None:
        self._windows, self._layers = windows, layers

    @property
    def calls_left(self) -> int:
        """How many calls of the record were not replayed yet."""
        return len(self._windows.recorded.calls) - self._windows.next_call

    def rewind(self) -> None:
        """Begin with the first call of the record again."""
        self._windows.rewind()

    def load(self, recorded: RecordedRouting) -> None:
        """Take another record of the same model from its first call on. Nothing is compiled or
        captured again. Raises TypeError or ValueError for a record that does not fit, before
        anything changes."""
        _check_fits(recorded, self._layers, weights=self._windows.weights_LSK is not None)
        largest = max((batch * tokens for batch, tokens in recorded.calls), default=0)
        if largest > self._windows.ids_LSK.shape[1]:
            raise ValueError(
                f"recorded has a call of {largest} tokens, and there is room for "
                f"{self._windows.ids_LSK.shape[1]}; begin another replay_routing with it"
            )
        self._windows.load(recorded)


@contextmanager
def record_routing(
    model: nn.Module, *, weights: bool = False, tokens: int = TOKENS
) -> Iterator[Recording]:
    """Inside, the experts of every token in every layer are written down:

        with moe_ops.record_routing(model) as recording:
            model.generate(input_ids, max_new_tokens=100)
        recording.take().joined().save("routing.safetensors")

    model: a model of transformers, or any module whose experts are `MoELayer`s, called with ids or
    floats [..., tokens, width]; the one that is called: what `compile` returned, or one that is not
    compiled. All calls in the context that do not fail are recorded: forwards, prompts and steps of
    `generate`, captured ones, too, and training. Results stay as they are. weights: record routing
    weights, too, in float32. tokens: rows of the rings on the device, `tokens * layers * top_k`
    numbers of two bytes (of six with weights); a call has to fit into them, a compiled one of up to
    4096 tokens twice, padded.

    In inference the kernels that route write ids themselves. Of routers that need their own code,
    for gradients or as no rule says what they compute, ids are copied by a launch of their own. The
    host is told of each call; rings are emptied by asynchronous copies to pinned memory between
    calls, so nothing waits, and no row is lost. Rows that pad a batch are left out, as are
    candidates that assisted decoding takes back. Of beams the rows of calls are recorded, which
    change places. Where compiled code is first called inside, and first called outside again, it is
    looked up or compiled anew, and steps are captured anew.

    Raises TypeError for what is no module, ValueError for a model without experts, for layers that
    differ in experts or choices, for more experts than two bytes tell apart, for experts on several
    devices, and for a model that is recorded or replayed already. A call of more tokens than the
    rings have raises ValueError, and so does one that runs a layer several times.
    """
    check_flag("weights", weights)
    check_int("tokens", tokens, least=1)
    layers = _layers_of(model)
    first = layers[0]
    rings = Rings(
        tuple(layer.name for layer in layers), first.num_experts, first.top_k, tokens,
        weights=weights, device=_device(layers),
    )  # fmt: skip
    swapped = _kind_of(model).recording(layers, rings.ids, rings.weights, rings.at)
    with _told(model, rings, swapped, layers):
        yield Recording(rings)


@contextmanager
def replay_routing(
    model: nn.Module, recorded: RecordedRouting, *, weights: bool = False
) -> Iterator[Replay]:
    """Inside, tokens go to the experts that were recorded for them:

        with moe_ops.replay_routing(model, recorded.joined()):
            loss = model(input_ids=text, labels=labels).loss

    model: as of `record_routing`; it may be another copy of the model that was recorded, compiled
    or not, in training or in `generate`. Its calls are those of the record, one by one, with the
    same sequences and tokens. Weights are computed from the logits of now by each router's
    definition, with its scores, sums and scales, and gradients reach the logits through them; with
    `weights` the recorded ones are taken as well. Tokens of which nobody recorded experts are
    routed as always.

    Run the backward of a call before the next call where activations are checkpointed: what is
    computed again reads the experts of the last call.

    Raises TypeError or ValueError, and changes nothing, for what is no model, for a record of other
    layers, experts or choices, without weights where these are asked for, and for routers that
    cannot weigh given experts. A call of other sizes than the record's next one, one more than it
    has, and one that runs a layer several times raises ValueError. A call that failed comes again.
    """
    check_flag("weights", weights)
    layers, kind = _layers_of(model), _kind_of(model)
    _check_fits(recorded, layers, weights=weights)
    for layer in layers:
        reason = None if weights else kind.replay_refusal(layer)
        if reason is not None:
            raise ValueError(
                f"{called(layer.name)} cannot weigh given experts: {reason}; record with "
                "weights=True and replay these with weights=True"
            )
    windows = Windows.of(recorded, weights=weights, device=_device(layers))
    swapped = kind.replaying(layers, windows.ids_LSK, windows.weights_LSK)
    with _told(model, windows, swapped, layers):
        yield Replay(windows, layers)


@contextmanager
def _told(model: nn.Module, told: Told, swapped: Any, layers: list[Layer]) -> Iterator[None]:
    """A context in which somebody is told of a model's calls; then its modules are what they
    were."""
    inside = inside_of_peft(model)
    counted = {layer.name: _swapped_of(layer) for layer in layers}
    try:
        with watched(inside, told, counted, is_compiled=_is_compiled(inside)):
            yield
    finally:
        swapped.undo()


def _swapped_of(layer: Layer) -> nn.Module:
    """What of a layer writes its choices, or reads them."""
    parts = (getattr(layer, "router", None), layer.experts)
    return next(m for m in parts if m is not None and {RING_IDS, GIVEN_IDS} & m._buffers.keys())


def _kind_of(model: nn.Module) -> Any:
    """What knows the layers of a model: those of transformers, or bare ones."""
    if not is_transformers_model(inside_of_peft(model)):
        return bare
    require_transformers("routings of a model of transformers")
    from moe_ops.hf import routed

    return routed


def _layers_of(model: nn.Module) -> list[Layer]:
    check_type("model", model, nn.Module, "a model of transformers, or one with MoELayers")
    inside = inside_of_peft(model)
    if TOLD in vars(inside):
        raise ValueError(
            f"routings of this {type(model).__name__} are recorded or replayed already; leave the "
            "context around this one first"
        )
    _follow(inside)
    layers: list[Layer]
    if is_transformers_model(inside):
        layers = _kind_of(model).routed_of(inside)
    else:
        layers = [*bare.bare_of(inside)]
    if not layers:
        raise ValueError(
            f"this {type(model).__name__} has no experts that are known, and so no routing: it is "
            "no model of transformers and has no MoELayer; in the place of route call "
            "moe_ops.route_recording and route_replaying"
        )
    for name, numbers in (
        ("experts", {layer.num_experts for layer in layers}),
        ("choices", {layer.top_k for layer in layers}),
    ):
        if len(numbers) > 1:
            raise ValueError(
                f"layers have other numbers of {name} each, {sorted(numbers)}, and a record has "
                "one for all"
            )
    if layers[0].num_experts > MOST_EXPERTS:
        raise ValueError(
            f"the model has {layers[0].num_experts} experts, and two bytes tell {MOST_EXPERTS} "
            "apart"
        )
    return layers


def _check_fits(recorded: RecordedRouting, layers: list[Layer], *, weights: bool) -> None:
    """Raise TypeError or ValueError unless a record is one of a model with such layers."""
    check_type("recorded", recorded, RecordedRouting, "what record_routing recorded, or was loaded")
    first = layers[0]
    for what, of_record, of_model in (
        ("layers of experts", len(recorded.layers), len(layers)),
        ("experts", recorded.num_experts, first.num_experts),
        ("choices", recorded.top_k, first.top_k),
    ):
        if of_record != of_model:
            raise ValueError(
                f"recorded has {of_record} {what}, and the model {of_model}; replay a record of "
                "the same model"
            )
    if weights and recorded.weights_TLK is None:
        raise ValueError(
            "recorded has no weights; record with weights=True, or leave weights out, and they are "
            "computed from the logits"
        )


def _is_compiled(model: nn.Module) -> bool:
    """Whether `compile` made a model, whose calls tell by themselves."""
    call = type(getattr(model, "_compiled_call_impl", None))
    return "_moe_ops_fallback" in vars(model) or call.__module__.startswith("moe_ops.")


@torch.no_grad()
def _follow(model: nn.Module) -> None:
    """Have a compiled model be what its model has become, of other experts perhaps, as each of its
    calls does first."""
    call, generate = (vars(model).get(n) for n in ("_compiled_call_impl", "_moe_ops_fallback"))
    follow = getattr(call, "before", None) or getattr(generate, "follow", None)
    if follow is not None:
        follow()


def _device(layers: list[Layer]) -> torch.device:
    """Where the experts are. Raises ValueError if that is in several places."""
    held = (chain(m.experts.parameters(), m.experts.buffers()) for m in layers)
    devices = {t.device for tensors in held for t in tensors}
    if len(devices) != 1:
        raise ValueError(
            f"experts are on {', '.join(sorted(map(str, devices)))}, and a record is on one; load "
            "the model onto one device"
        )
    return devices.pop()
