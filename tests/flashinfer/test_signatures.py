"""What FlashInfer's functions take: the table against the published package, and versions that take
other things than backends give."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moe_ops.backends.flashinfer import package
from tests.flashinfer import signatures
from tests.flashinfer.layers import call_of, run, stored

On = Callable[[int, int], None]
WRITE = "python -m tests.flashinfer.signatures WHEEL"
NEWEST = signatures.TABLE[signatures.NEWEST]


def test_backends_know_the_versions_of_the_table() -> None:
    numbers = [package._numbers(version) for version in signatures.TABLE]
    assert numbers == sorted(numbers)
    assert numbers[0] == package._numbers(package.LEAST)
    assert numbers[-1] == package._numbers(package.KNOWN)


@pytest.mark.parametrize("version", signatures.TABLE)
def test_numbers_of_enumerations_are_those_of_every_version(fake: ModuleType, version: str) -> None:
    for name in signatures.ENUMS:
        ours = {member.name: member.value for member in getattr(fake.fused_moe.kinds, name)}
        assert ours.items() <= signatures.TABLE[version][name].items()


def test_the_published_package_is_as_in_the_table() -> None:
    """One that is not in the table may take more; tests of backends say whether it takes enough."""
    found = signatures.published()
    if found is None:
        pytest.skip(f"{signatures.DISTRIBUTION} is neither installed nor in {signatures.WHEELS}")
    version, root = found
    assert signatures.lacking(root) == []
    was = signatures.TABLE.get(version, NEWEST)
    changed = "\n".join(signatures.changes(was, signatures.record_of(root)))
    if version in signatures.TABLE:
        assert not changed, f"the table is not as {version}, run {WRITE}:\n{changed}"
    elif changed:
        warnings.warn(f"{version} is not in the table, run {WRITE}:\n{changed}", stacklevel=1)


CHANGED = {
    "gone": ("top_k, n_group", "n_group", "gone or changed: top_k;"),
    "renamed": ("top_k, n_group", "k, n_group", "top_k; new or changed: k"),
    "default": ("do_finalize=True", "do_finalize=False", "do_finalize; new"),
    "order": ("num_experts, top_k", "top_k, num_experts", "the order of parameters is another"),
    "no_function": ("def trtllm_bf16_routed_moe", "def other", "is not in flashinfer/fused_moe/"),
    "named_default": ("weight_layout=...", "weight_layout=Layout.MajorK", None),
    "more": ("output=None", "output=None, more=None", "gone or changed: nothing; new or changed: "),
}  # fmt: skip


def source_of(record: signatures.Record) -> str:
    """A source of what a version takes."""
    lines = ["from __future__ import annotations"]
    for name, taken in record["functions"].items():
        owner, _, function = name.rpartition(".")
        is_method = owner.endswith("Wrapper")
        if owner:
            lines.append(f"class {owner}:" if is_method else f"def {owner}({OUTER}):")
        first = "self, " if is_method else ""
        lines.append(f"{' ' if owner else ''}def {function}({first}{taken}): ...")
    for owner, attributes in signatures.ATTRIBUTES.items():
        lines += [f"class {owner}:", " def set(self):", *(f"  self.{n} = 0" for n in attributes)]
    for enum in signatures.ENUMS:
        lines += [f"class {enum}:", *(f" {n} = {v}" for n, v in record[enum].items())]
    return "\n".join(lines)


OUTER = NEWEST["functions"]["get_cutlass_fused_moe_module"]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Sources of the newest version of the table, at the places of the package's."""
    exports = {
        place: f"from elsewhere import {', '.join(names)}\n"
        for place, names in signatures.EXPORTS.items()
    }
    places = (*signatures.PLACES.values(), signatures.ENUMS_AT)
    for place, text in (dict.fromkeys(places, source_of(NEWEST)) | exports).items():
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def differences(root: signatures.Root) -> list[str]:
    return signatures.lacking(root) + signatures.changes(NEWEST, signatures.record_of(root))


@pytest.mark.parametrize(("old", "new", "said"), CHANGED.values(), ids=CHANGED)
def test_a_change_is_named(copy: Path, old: str, new: str, said: str | None) -> None:
    assert signatures.record_of(copy) == NEWEST and differences(copy) == []
    path, name = copy / signatures.PLACES["trtllm_bf16_routed_moe"], "def trtllm_bf16_routed_moe"
    before, function, after = path.read_text().partition(name)
    line, end, rest = (function + after).partition("\n")
    assert line.count(old) == 1
    path.write_text(before + line.replace(old, new) + end + rest)
    found = differences(copy)
    assert found == [] if said is None else said in found[0], found
    assert all("trtllm_bf16_routed_moe" in sentence for sentence in found)


def test_a_wheel_is_read_as_it_is(
    copy: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path_factory.mktemp("wheels")
    packed = shutil.make_archive(str(wheels / "packed"), "zip", copy)
    wheel = Path(packed).rename(wheels / "flashinfer_python-9.8-py3-none-any.whl")
    monkeypatch.setattr(signatures, "WHEELS", wheels)
    monkeypatch.setattr(signatures, "DISTRIBUTION", "flashinfer-that-nobody-installed")
    found = signatures.published()
    assert found is not None
    version, root = found
    assert version == "9.8" and differences(root) == []
    assert signatures._versions() == signatures.TABLE | {"9.8": NEWEST}
    monkeypatch.setattr(signatures, "FILE", wheels / "signatures.json")
    signatures.write(wheel)
    assert json.loads(signatures.FILE.read_text()) == signatures.TABLE | {"9.8": NEWEST}


def test_names_that_are_not_exported_any_more_are_named(copy: Path) -> None:
    place = "flashinfer/fused_moe/__init__.py"
    path = copy / place
    path.write_text(path.read_text().replace("cutlass_fused_moe,", "cutlass_moe,"))
    assert differences(copy) == [f"{place} exports no cutlass_fused_moe"]


def test_attributes_and_members_are_named(copy: Path) -> None:
    for path in {copy / place for place in (*signatures.PLACES.values(), signatures.ENUMS_AT)}:
        text = path.read_text().replace("self._static_workspace", "self._other")
        path.write_text(text.replace("Relu2 = 6", "Relu2 = 7"))
    assert differences(copy) == [
        "B12xMoEWrapper sets no _static_workspace",
        "ActivationType.Relu2 is 7, was 6",
    ]


@pytest.fixture
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A version after all that are known, of which one function takes something else."""
    name, old, new = request.param
    functions = dict(NEWEST["functions"])
    if new is None:
        del functions[name]
    else:
        assert functions[name].count(old) == 1
        functions[name] = functions[name].replace(old, new)
    monkeypatch.setitem(signatures.VERSIONS, "9.8", NEWEST | {"functions": functions})
    return "9.8"


ROUTED = "trtllm_bf16_routed_moe"
KNOWN = r"; moe_ops knows 0\.7\.2 to 0\.7\.4, install one of these"
GIVEN = rf"flashinfer-python 9\.8 does not take what moe_ops gives to {ROUTED}: "
UNFIT = {
    "gone": ((ROUTED, ", output=None", ""), f"{GIVEN}got an unexpected keyword.* 'output'{KNOWN}"),
    "needed": ((ROUTED, "topk_ids", "topk_ids, more"), f"{GIVEN}missing a .*: 'more'{KNOWN}"),
    "no_function": ((ROUTED, "", None), rf"9\.8 has no {ROUTED} in flashinfer.fused_moe{KNOWN}"),
    "no_other": (("trtllm_bf16_moe", "", None), None),
    "more": ((ROUTED, "output=None", "output=None, more=None"), None),
}  # fmt: skip


@pytest.mark.parametrize(("version", "said"), UNFIT.values(), ids=UNFIT, indirect=["version"])
def test_a_later_version(fake: ModuleType, on: On, said: str | None) -> None:
    """It is refused, in words, by the call that it does not take, and by no other."""
    on(10, 0)
    call = stored(call_of("bfloat16"), "flashinfer.shuffled")
    if said is None:
        assert run("flashinfer_trtllm", call).shape == call.x_TD.shape
        return
    with pytest.raises(RuntimeError, match=said):
        run("flashinfer_trtllm", call)


def test_an_error_of_a_function_is_its_own() -> None:
    def function(x: Any) -> None:
        raise TypeError("x is of no type")

    with pytest.raises(TypeError, match=r"^x is of no type$"):
        package.call(function, 1)
