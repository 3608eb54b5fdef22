"""Derived tensors follow their sources, keep none of them alive, and permute with the experts."""

import copy
import functools
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_ops.quant.derived import Derived, permute_experts, permute_experts_

E = 4
tiled, swapped = (functools.partial(torch.roll, shifts=1, dims=dim) for dim in (2, 1))


@dataclass
class Build:
    """A builder that counts its calls."""

    function: Callable[..., Tensor]
    calls: int = field(default=0, init=False)

    def __call__(self, *sources: Tensor) -> Tensor:
        self.calls += 1
        return self.function(*sources)


def doubled() -> Build:
    return Build(lambda scale: scale * 2)


def layer() -> dict[str, Tensor]:
    """The tensors of a layer: values, scales, zeros, global scales and biases of every expert."""
    return {
        "values": torch.randint(0, 256, (E, 6, 4), dtype=torch.uint8),
        "scales": torch.rand(E, 6, 2).to(torch.float8_e4m3fn),
        "e8m0": torch.randint(0, 256, (E, 6, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "zeros": torch.randint(0, 16, (E, 6, 2), dtype=torch.uint8),
        "global_scales": torch.rand(E),
        "biases": torch.nn.Parameter(torch.rand(E, 6, dtype=torch.bfloat16)),
    }


def clones(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, as bytes too, since not every dtype has ==."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def raw(t: Tensor) -> Tensor:
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def test_an_unchanged_source_is_built_from_once() -> None:
    derived, build, scale = Derived(), doubled(), torch.ones(E)
    first = derived.get("doubled", (scale,), build)
    assert torch.equal(first, torch.full((E,), 2.0))
    assert derived.get("doubled", (scale,), build) is first
    assert build.calls == 1
    assert torch.equal(scale, torch.ones(E))
    assert scale._version == 0
    assert Derived().get("doubled", (scale,), build) is not first  # layers share nothing


def in_place(scale: Tensor) -> None:
    scale.mul_(2)


def by_item(scale: Tensor) -> None:
    scale[1] = 5.0


def through_a_view(scale: Tensor) -> None:
    scale.view(2, 2)[1].add_(1)


def through_detach(scale: Tensor) -> None:
    scale.detach().copy_(torch.arange(4.0))


def in_inference_mode(scale: Tensor) -> None:
    with torch.inference_mode():
        scale.zero_()


def new_data(scale: Tensor) -> None:
    scale.data = torch.full((E,), 7.0)


def new_length(scale: Tensor) -> None:
    scale.data = scale.data[: len(scale) // 2]


def new_shape(scale: Tensor) -> None:
    scale.data = scale.data.view(1, -1)


IN_PLACE = [in_place, by_item, through_a_view, through_detach, in_inference_mode]
NEW_DATA = [new_data, new_length, new_shape]


@pytest.mark.parametrize("is_parameter", [False, True], ids=["tensor", "parameter"])
@pytest.mark.parametrize("write", IN_PLACE + NEW_DATA, ids=lambda f: f.__name__)
def test_a_changed_source_is_followed(write: Callable[[Tensor], None], is_parameter: bool) -> None:
    derived, build = Derived(), doubled()
    scale = torch.nn.Parameter(torch.ones(E)) if is_parameter else torch.ones(E)
    for calls in (1, 2):
        assert same(derived.get("doubled", (scale,), build), scale * 2)
        assert same(derived.get("doubled", (scale,), build), scale * 2)
        assert build.calls == calls
        with torch.no_grad():
            write(scale)


def test_other_memory_at_the_same_address_is_another_source() -> None:
    derived, scale, memory = Derived(), torch.ones(E), bytearray(4 * E)
    scale.data = torch.frombuffer(memory, dtype=torch.float32)
    assert derived.get("doubled", (scale,), doubled()).tolist() == [0.0] * E
    memory[:] = raw(torch.ones(E)).numpy().tobytes()
    scale.data = torch.frombuffer(memory, dtype=torch.float32)
    assert derived.get("doubled", (scale,), doubled()).tolist() == [2.0] * E


def test_bytes_read_as_another_dtype_are_another_source() -> None:
    derived, scale = Derived(), torch.full((E,), 127, dtype=torch.uint8)
    assert derived.get("float", (scale,), Tensor.float).tolist() == [127.0] * E
    scale.data = scale.data.view(torch.float8_e8m0fnu)
    assert derived.get("float", (scale,), Tensor.float).tolist() == [1.0] * E


def test_a_tensor_made_for_the_call_is_another_source() -> None:
    derived, scale = Derived(), torch.ones(E)
    for value in (2.0, 4.0):  # `scale.data` starts to count writes at 0 each time
        assert derived.get("doubled", (scale.data,), doubled()).tolist() == [value] * E
        scale.mul_(2)


@pytest.mark.parametrize("changed", [0, 1])
def test_any_of_several_sources_counts(changed: int) -> None:
    derived, build = Derived(), Build(torch.mul)
    sources = torch.full((E,), 3.0), torch.full((E,), 5.0)
    assert derived.get("product", sources, build).tolist() == [15.0] * E
    sources[changed].mul_(2)
    assert derived.get("product", sources, build).tolist() == [30.0] * E
    assert derived.get("product", sources, build).tolist() == [30.0] * E
    assert build.calls == 2


def test_a_replaced_source_is_followed() -> None:
    derived, build = Derived(), doubled()
    derived.get("doubled", (torch.ones(E),), build)
    new = torch.full((E,), 3.0)
    assert derived.get("doubled", (new,), build).tolist() == [6.0] * E
    equal = new.clone()
    assert derived.get("doubled", (equal,), build).tolist() == [6.0] * E
    assert build.calls == 3


def test_another_number_or_order_of_sources_is_another_result() -> None:
    derived, build = Derived(), Build(lambda *sources: torch.stack(sources).cumsum(0)[0] * 1)
    a, b = torch.zeros(E), torch.ones(E)
    for sources in ((a, b), (b, a), (a,), (a, a)):
        assert torch.equal(derived.get("first", sources, build), sources[0])
    assert build.calls == 4


def test_two_backends_derive_from_one_weight() -> None:
    derived, scales = Derived(), torch.rand(E, 6, 2).to(torch.float8_e4m3fn)
    builds = {"cutlass": Build(tiled), "flashinfer": Build(swapped)}
    for calls in (1, 2):
        results = {name: derived.get(name, (scales,), build) for name, build in builds.items()}
        assert all(same(results[name], build.function(scales)) for name, build in builds.items())
        for name, build in builds.items():
            assert derived.get(name, (scales,), build) is results[name]
            assert build.calls == calls
        scales.copy_(torch.rand(E, 6, 2))


@pytest.mark.parametrize("name", ["doubled", None])
def test_forget_builds_anew_after_a_write_that_torch_does_not_count(name: str | None) -> None:
    derived, build, scale = Derived(), doubled(), torch.ones(E)
    derived.get("doubled", (scale,), build)
    scale.data.mul_(2)
    assert derived.get("doubled", (scale,), build).tolist() == [2.0] * E  # as documented
    derived.forget(name)
    assert derived.get("doubled", (scale,), build).tolist() == [4.0] * E
    derived.forget("never derived")
    assert build.calls == 2


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "dropped"])
def test_a_source_is_not_kept_alive(replaced: bool) -> None:
    derived, build, scale = Derived(), doubled(), torch.ones(E)
    derived.get("doubled", (scale,), build)
    references = weakref.ref(scale), weakref.ref(scale.untyped_storage())
    scale = torch.zeros(E)
    if replaced:
        derived.get("doubled", (scale,), build)
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_replaced_result_is_not_kept_alive() -> None:
    derived, scale = Derived(), torch.ones(E)
    result = weakref.ref(derived.get("doubled", (scale,), doubled()))
    assert result() is not None
    scale.mul_(2)

    def build(scale: Tensor) -> Tensor:
        assert result() is None, "its memory must be free for the build"
        return scale * 2

    derived.get("doubled", (scale,), build)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[1:],
        pytest.param(lambda t: t, marks=pytest.mark.slow),
        pytest.param(lambda t: t.detach(), marks=pytest.mark.slow),
    ],
    ids=["view", "itself", "detached"],
)
def test_a_view_of_a_source_follows_and_is_not_kept(view: Callable[[Tensor], Tensor]) -> None:
    derived, scale = Derived(), torch.ones(E)
    result = derived.get("view", (scale,), view)
    scale.mul_(2)
    assert torch.equal(result, view(scale))
    assert torch.equal(derived.get("view", (scale,), view), view(scale))
    reference = weakref.ref(scale.untyped_storage())
    del result, scale
    gc.collect()
    assert reference() is None


def test_results_serve_training_and_inference() -> None:
    scale = torch.nn.Parameter(torch.ones(E))
    derived = Derived()
    with torch.inference_mode():
        result = derived.get("doubled", (scale,), doubled())
    assert not result.is_inference()
    assert not result.requires_grad
    x = torch.ones(E, requires_grad=True)
    (x * derived.get("doubled", (scale,), doubled())).sum().backward()
    assert torch.equal(x.grad, torch.full((E,), 2.0))


def test_inference_tensors_are_refused() -> None:
    with torch.inference_mode():
        scale = torch.ones(E)
    message = re.escape(
        "source 1 of 'product' was made under torch.inference_mode(), where torch does not count "
        "writes; load weights under torch.no_grad() instead"
    )
    with pytest.raises(ValueError, match=message):
        Derived().get("product", (torch.ones(E), scale), torch.mul)
    assert Derived().get("doubled", (scale.clone(),), doubled()).tolist() == [2.0] * E


def test_something_must_be_derived_from() -> None:
    with pytest.raises(ValueError, match="'ones' needs at least one source tensor, got none"):
        Derived().get("ones", (), lambda: torch.ones(E))


def test_a_build_that_changes_a_source_is_refused() -> None:
    derived, scale = Derived(), torch.ones(E)
    message = "building 'product' changed its source 1, a checkpoint tensor; build from a copy"
    for _ in range(2):  # nothing is kept of the first
        with pytest.raises(RuntimeError, match=message):
            derived.get("product", (torch.ones(E), scale), lambda a, b: b.mul_(2) * a)


def test_a_build_that_fails_leaves_nothing() -> None:
    derived, scale = Derived(), torch.ones(E)
    derived.get("doubled", (scale,), doubled())
    scale.mul_(2)
    with pytest.raises(ZeroDivisionError):
        derived.get("doubled", (scale,), lambda s: 1 / 0)
    assert derived.get("doubled", (scale,), doubled()).tolist() == [4.0] * E


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_are_empty(copied: Callable[[Derived], Derived]) -> None:
    derived, scale, build = Derived(), torch.ones(E), doubled()
    kept = derived.get("doubled", (scale,), build)
    other = copied(derived).get("doubled", (scale,), build)
    assert other is not kept
    assert build.calls == 2
    assert derived.get("doubled", (scale,), build) is kept


@given(order=st.permutations(range(E)), dtype=st.sampled_from([torch.int32, torch.int64]))
def test_experts_permute_in_lockstep(order: list[int], dtype: torch.dtype) -> None:
    tensors = layer()
    before = clones(tensors)
    permuted = permute_experts(torch.tensor(order, dtype=dtype), tensors)
    assert list(permuted) == list(tensors)
    for name, t in permuted.items():
        assert same(t, torch.stack([before[name][expert] for expert in order]))
        assert not t.requires_grad
        assert t.untyped_storage() is not tensors[name].untyped_storage()
        assert same(tensors[name], before[name])
        assert tensors[name]._version == 0


@given(order=st.permutations(range(E)))
def test_what_is_derived_permutes_with_the_experts(order: list[int]) -> None:
    tensors, derived = layer(), Derived()
    before = clones(tensors)
    objects = dict(tensors)

    def derive() -> dict[str, Tensor]:
        return {
            "swizzled": derived.get("swizzled", (tensors["scales"],), tiled),
            "zeros": derived.get("zeros", (tensors["zeros"],), swapped),
            "biases": derived.get("biases", (tensors["biases"],), Tensor.float),
            "alphas": derived.get("alphas", (tensors["global_scales"],), lambda s: s * 0.5),
        }

    old = {name: t.clone() for name, t in derive().items()}
    permute_experts_(torch.tensor(order), tensors)
    for name, t in tensors.items():
        assert t is objects[name]
        assert same(t, torch.stack([before[name][expert] for expert in order]))
    for name, t in derive().items():
        assert same(t, torch.stack([old[name][expert] for expert in order]))


def test_tensors_that_share_memory_permute_once() -> None:
    w13 = torch.arange(E * 4).reshape(E, 4)
    before = w13.clone()
    permute_experts_(torch.tensor([1, 2, 3, 0]), {"w13": w13, "tied": w13, "gate": w13[:, :2]})
    assert torch.equal(w13, before[[1, 2, 3, 0]])


MISSING = "order must hold each of the 4 experts once, but expert {} is missing".format
NO_ORDERS = {
    "twice": (torch.tensor([0, 1, 1, 3]), MISSING(2)),
    "beyond": (torch.tensor([1, 2, 3, 4]), MISSING(0)),
    "below": (torch.tensor([-1, 0, 1, 2]), MISSING(3)),
    "matrix": (torch.zeros(2, 2).long(), "order must have 1 axes, got shape (2, 2)"),
    "too_few": (torch.tensor([1, 0]), "values must have the 2 experts of order on axis 0, got"),
}
each_permute = pytest.mark.parametrize(
    "permute", [permute_experts, permute_experts_], ids=lambda f: f.__name__
)


@each_permute
@pytest.mark.parametrize(("order", "message"), NO_ORDERS.values(), ids=NO_ORDERS)
def test_what_is_no_order_is_refused(
    permute: Callable[..., object], order: Tensor, message: str
) -> None:
    tensors = layer()
    before = clones(tensors)
    with pytest.raises(ValueError, match=re.escape(message)):
        permute(order, tensors)
    assert all(same(t, before[name]) for name, t in tensors.items())


@each_permute
def test_a_float_is_no_order(permute: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match=r"order must be int32, int64; got float32; convert it"):
        permute(torch.arange(4.0), layer())


with torch.inference_mode():
    UNCOUNTED = torch.ones(E)
CANNOT = {
    "scalar": (torch.tensor(1.0), "last must have the 4 experts of order on axis 0, got shape ()"),
    "shared": (torch.ones(1, 6), "got shape (1, 6); leave out what experts share"),
    "expanded": (torch.ones(1).expand(E), "last is expanded and cannot be written to; clone it"),
    "inference": (UNCOUNTED, "last was made under torch.inference_mode(), where torch does not"),
}


@pytest.mark.parametrize(("last", "message"), CANNOT.values(), ids=CANNOT)
def test_all_tensors_permute_or_none(last: Tensor, message: str) -> None:
    tensors = {**layer(), "last": last}
    before = clones(tensors)
    with pytest.raises(ValueError, match=re.escape(message)):
        permute_experts_(torch.tensor([1, 2, 3, 0]), tensors)
    assert all(same(t, before[name]) for name, t in tensors.items())
