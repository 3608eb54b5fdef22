"""The stand-in takes what FlashInfer takes: its signatures are those of the installed package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from moe_ops.backends.flashinfer import package
from tests.flashinfer import signatures

WRITE = "python tests/flashinfer/signatures.py"


def test_the_file_has_those_of_the_stand_in() -> None:
    held = json.loads(signatures.FILE.read_text())
    assert held == signatures.of_stand_in(), f"run {WRITE}"


def test_the_stand_in_is_no_older_than_what_backends_need() -> None:
    at_least, has = (package._numbers(v) for v in (package.LEAST, signatures.version_of_stand_in()))
    assert has >= at_least


def test_the_published_package_takes_the_same() -> None:
    found = signatures.published()
    if found is None:
        pytest.skip(f"{signatures.DISTRIBUTION} is neither installed nor in {signatures.WHEELS}")
    version, root = found
    changed = signatures.changes(signatures.of_stand_in(), root)
    assert not changed, "\n".join(
        [f"{signatures.DISTRIBUTION} {version} takes other arguments than the stand-in:", *changed,
         f"change moe_ops/backends/flashinfer and the stand-in, then run {WRITE}"]
    )  # fmt: skip


CHANGED = {
    "gone": ("    top_k: int,\n    n_group", "    n_group", "gone or changed: top_k;"),
    "renamed": ("top_k: int,\n    n_group", "k: int,\n    n_group", "top_k; new or changed: k"),
    "default": ("do_finalize: bool = True", "do_finalize: bool = False", "do_finalize; new"),
    "order": ("    num_experts: int,\n    top_k: int,", "    top_k: int,\n    num_experts: int,",
              "the order of parameters is another"),
    "no_function": ("def trtllm_bf16_routed_moe", "def other", "is not in flashinfer/fused_moe/"),
    "named_default": ("do_finalize: bool = True", "do_finalize: bool = YES", None),
}  # fmt: skip


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources of the stand-in at the places of the package's."""
    source = "\n".join(path.read_text() for path in sorted(signatures.STAND_IN.rglob("*.py")))
    source = source.replace("from __future__ import annotations\n", "")
    exports = {
        place: f"from elsewhere import {', '.join(names)}\n"
        for place, names in signatures.EXPORTS.items()
    }
    sources = dict.fromkeys((*signatures.PLACES.values(), signatures.ENUMS_AT), source)
    for place, text in (sources | exports).items():
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(("old", "new", "said"), CHANGED.values(), ids=CHANGED)
def test_a_change_is_named(copy: Path, old: str, new: str, said: str | None) -> None:
    assert signatures.changes(signatures.of_stand_in(), copy) == []
    path = copy / signatures.PLACES["trtllm_bf16_routed_moe"]
    before, function, after = path.read_text().partition("def trtllm_bf16_routed_moe")
    parameters, end, body = (function + after).partition(") -> Any:")
    assert parameters.count(old) == 1
    path.write_text(before + parameters.replace(old, new) + end + body)
    found = signatures.changes(signatures.of_stand_in(), copy)
    assert found == [] if said is None else (len(found) == 1 and said in found[0]), found


def test_a_wheel_is_read_as_it_is(
    copy: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels = tmp_path_factory.mktemp("wheels")
    packed = shutil.make_archive(str(wheels / "packed"), "zip", copy)
    Path(packed).rename(wheels / "flashinfer_python-9.8-py3-none-any.whl")
    monkeypatch.setattr(signatures, "WHEELS", wheels)
    monkeypatch.setattr(signatures, "DISTRIBUTION", "flashinfer-that-nobody-installed")
    found = signatures.published()
    assert found is not None
    version, root = found
    assert version == "9.8" and signatures.changes(signatures.of_stand_in(), root) == []


def test_names_that_are_not_exported_any_more_are_named(copy: Path) -> None:
    place = "flashinfer/fused_moe/__init__.py"
    path = copy / place
    path.write_text(path.read_text().replace("cutlass_fused_moe,", "cutlass_moe,"))
    changed = signatures.changes(signatures.of_stand_in(), copy)
    assert changed == [f"{place} exports no cutlass_fused_moe"]


def test_attributes_and_members_are_named(copy: Path) -> None:
    for path in {copy / place for place in (*signatures.PLACES.values(), signatures.ENUMS_AT)}:
        text = path.read_text().replace("self._static_workspace", "self._other")
        path.write_text(text.replace("Relu2 = 6", "Relu2 = 7"))
    assert signatures.changes(signatures.of_stand_in(), copy) == [
        "ActivationType.Relu2 is 7, was 6",
        "B12xMoEWrapper sets no _static_workspace",
    ]


def test_a_function_that_takes_less_is_refused(fake: ModuleType) -> None:
    package.require(fake.autotune, "autotune", "cache")
    with pytest.raises(RuntimeError, match=r"0\.7\.2\.post1: autotune takes no colour; .* 0\.7\.2"):
        package.require(fake.autotune, "autotune", "cache", "colour")
