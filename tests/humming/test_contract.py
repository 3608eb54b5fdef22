"""What `bench layer` calls of Humming is in the stand-in and in the published package, whose wheel
is read and never imported."""

from __future__ import annotations

import ast
import importlib.metadata
import zipfile
from pathlib import Path

import pytest

from moe_ops.bench import humming
from tests.flashinfer.signatures import WHEELS, Root, read

STAND_IN = Path(__file__).parent / "stand_in"
DISTRIBUTION = "humming-kernels"
# Where it is, and by which names it is handed what.
CALLED = {
    "humming/layer.py": {
        "HummingLayer.load_from_tensors": ("tensors",),
        "HummingLayer.transform": (),
        "HummingLayer.forward": (
            "inputs", "input_scale", "sorted_ids", "expert_ids", "num_tokens_padded", "top_k",
            "compute_config", "tuning_config",
        ),
    },
    "humming/forward.py": {
        "may_process_input": ("config", "inputs", "activation_type", "activation_impl"),
    },
    "humming/tune/__init__.py": {
        "get_heuristics_config": ("layer_config", "shape_m", "gemm_type", "device"),
    },
}  # fmt: skip
# The layer is a dataclass.
FIELDS = ("shape_n", "shape_k", "weight_config", "input_config", "num_experts", "torch_dtype")
# What a config is called in a dict, and members of enumerations that are passed by their values.
ALIASES = {
    "HummingWeightSchema": ("dtype", "scale_dtype", "group_size"),
    "HummingInputSchema": ("dtype",),
}
MEMBERS = {
    ("ActivationType", "BinarySplit"): humming.SPLIT,
    ("GemmType", "INDEXED"): humming.INDEXED,
}


def source(root: Root, place: str) -> str:
    """A module's source, which a package of the stand-in has in a file."""
    paths = (root / place, root / place.replace("/__init__.py", ".py"))
    return next((path.read_text() for path in paths if path.is_file()), "")


def differences(root: Root) -> list[str]:
    """A sentence for everything that a package's functions do not take, or want besides."""
    found = []
    for place, functions in CALLED.items():
        for name, given in functions.items():
            signature = read(source(root, place), name)
            if signature is None:
                found.append(f"there is no {name} in {place}")
                continue
            wanted = {n for n, (_, default) in signature.items() if default is None}
            found += [f"{name} takes no {n}" for n in given if n not in signature]
            found += [f"{name} wants {n}" for n in sorted(wanted.difference(given))]
    fields = fields_of(source(root, "humming/layer.py"), "HummingLayer")
    found += [f"HummingLayer has no {name}" for name in FIELDS if name not in fields]
    return found + [f"HummingLayer wants {n}" for n in sorted({*required(fields)} - {*FIELDS})]


def class_of(text: str, name: str) -> list[ast.stmt]:
    classes = (n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == name)
    return next((node.body for node in classes), [])


def fields_of(text: str, name: str) -> dict[str, ast.expr | None]:
    """The annotated names of a class, with their values."""
    nodes = (n for n in class_of(text, name) if isinstance(n, ast.AnnAssign))
    return {n.target.id: n.value for n in nodes if isinstance(n.target, ast.Name)}


def required(fields: dict[str, ast.expr | None]) -> list[str]:
    return [name for name, value in fields.items() if value is None]


def words_differ(root: Root) -> list[str]:
    """A sentence for every word of a config or an enumeration that a package does not know."""
    found, schemas = [], source(root, "humming/schema/humming.py")
    for name, words in ALIASES.items():
        aliases = fields_of(schemas, name).get("KWARGS_ALIAS")
        known = (
            {w for names in ast.literal_eval(aliases).values() for w in names} if aliases else ()
        )
        found += [f"{name} knows no {word}" for word in words if word not in known]
    for (name, member), value in MEMBERS.items():
        nodes = class_of(source(root, "humming/config/enum.py"), name)
        values = {ast.unparse(n.targets[0]): n.value for n in nodes if isinstance(n, ast.Assign)}
        got = ast.literal_eval(values[member]) if member in values else None
        found += [f"{name}.{member} is {got}, was {value}"] if got != value else []
    return found


def published() -> tuple[str, Root] | None:
    """The version of the installed package and where it is, or of the wheel that `make` downloads
    beside it; None: there is neither."""
    try:
        distribution = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        wheels = sorted(WHEELS.glob("humming_kernels-*.whl"), key=lambda path: path.stat().st_mtime)
        return (wheels[-1].name.split("-")[1], zipfile.Path(wheels[-1])) if wheels else None
    return distribution.version, Path(str(distribution.locate_file("")))


def test_the_stand_in_takes_what_is_given_and_no_more() -> None:
    assert differences(STAND_IN) == []
    for place, functions in CALLED.items():
        for name, given in functions.items():
            signature = read(source(STAND_IN, place), name) or {}
            assert [*signature] == [*given], name
    assert [*fields_of(source(STAND_IN, "humming/layer.py"), "HummingLayer")] == [*FIELDS]


def test_the_published_package_takes_the_same() -> None:
    found = published()
    if found is None:
        pytest.skip(f"{DISTRIBUTION} is neither installed nor in {WHEELS}")
    version, root = found
    changed = differences(root) + words_differ(root)
    assert not changed, "\n".join(
        [f"{DISTRIBUTION} {version} is not what moe_ops/bench/humming.py calls:", *changed]
    )


CHANGED = {
    "gone": ("layer", "        top_k: int = 1,\n", "", "HummingLayer.forward takes no top_k"),
    "renamed": ("tune", "shape_m: int", "rows: int", "get_heuristics_config takes no shape_m"),
    "required": (
        "forward", "inputs: Tensor, *,", "inputs: Tensor, *, layout: str,",
        "may_process_input wants layout",
    ),
    "no_function": (
        "layer", "def transform(", "def prepare(", "there is no HummingLayer.transform in humming/"
    ),
    "no_field": (
        "layer", "    torch_dtype: torch.dtype\n", "", "HummingLayer has no torch_dtype"
    ),
    "field": (
        "layer", "    torch_dtype: torch.dtype\n", "    torch_dtype: torch.dtype\n    bits: int\n",
        "HummingLayer wants bits",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("module", "old", "new", "said"), CHANGED.values(), ids=CHANGED)
def test_a_change_is_named(tmp_path: Path, module: str, old: str, new: str, said: str) -> None:
    (tmp_path / "humming").mkdir()
    for path in (STAND_IN / "humming").glob("*.py"):
        (tmp_path / "humming" / path.name).write_text(path.read_text())
    changed = tmp_path / "humming" / f"{module}.py"
    assert changed.read_text().count(old) == 1
    changed.write_text(changed.read_text().replace(old, new))
    assert said in differences(tmp_path)[0]


def test_words_that_a_package_lacks_are_named(tmp_path: Path) -> None:
    assert words_differ(tmp_path) == [
        "HummingWeightSchema knows no dtype",
        "HummingWeightSchema knows no scale_dtype",
        "HummingWeightSchema knows no group_size",
        "HummingInputSchema knows no dtype",
        "ActivationType.BinarySplit is None, was binary_split",
        "GemmType.INDEXED is None, was indexed",
    ]
