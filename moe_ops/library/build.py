"""The library built from the sources of this package, by the compiler that Inductor uses."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from moe_ops.kernels import cpu
from moe_ops.kernels.cpu import loaded, quantized
from moe_ops.library import records

HERE = Path(__file__).parent
KERNELS = HERE.parent / "kernels" / "cpu"
# Element types of weights with those of inputs that kernels quantise for them; "": floats.
CODES = (
    *((element, "") for element in quantized.ELEMENTS),
    ("int8", "int8"),
    *((element, "float8_e4m3fn") for element in quantized.ELEMENTS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """A source file and what it is compiled with."""

    name: str
    text: str
    flags: Sequence[str] = ()
    macros: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The text with its macros, of which one may be a function that no command line takes."""
        return "".join(f"#define {n} {value}\n" for n, value in self.macros.items()) + self.text


def build(folder: str | Path, elements: Iterable[str] | None = None, jobs: int = 2) -> Path:
    """Build libmoe_ops in a folder, and give its path.

    `elements` are the element types of codes that `experts` and `moe` of the library multiply, all
    if left out; each takes seconds to compile. Raises ValueError for an unknown one,
    NotADirectoryError if the folder is a file, and what Inductor raises where nothing can be
    compiled.
    """
    chosen = tuple(quantized.ELEMENTS) if elements is None else tuple(elements)
    unknown = [repr(e) for e in chosen if e not in quantized.ELEMENTS]
    if unknown:
        known = ", ".join(quantized.ELEMENTS)
        raise ValueError(f"elements has {', '.join(unknown)}; choose some of {known}, or none")
    to = Path(folder).resolve()
    if to.exists() and not to.is_dir():
        raise NotADirectoryError(f"{to} is a file; name a folder, which is made if there is none")
    to.mkdir(parents=True, exist_ok=True)
    codes = [pair for pair in CODES if pair[0] in chosen]
    # Inductor takes no path with a space for what it writes, so that is elsewhere. A copy beside
    # the library is put in its place at once, as a process may have that loaded.
    with (
        tempfile.TemporaryDirectory(dir=to, prefix=".build-") as beside,
        tempfile.TemporaryDirectory(prefix="moe_ops-") as scratch,
    ):
        made = Path(shutil.copy(_built(Path(scratch), codes, jobs), beside))
        return made.replace(to / made.name)


def _built(scratch: Path, codes: Sequence[tuple[str, str]], jobs: int) -> Path:
    (scratch / "calls.h").write_text(records.header())
    include = [f"-I{shlex.quote(str(path))}" for path in (scratch, HERE, KERNELS)]
    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(lambda u: _compiled(u, scratch, include), _units(codes)))
    return _linked(objects, scratch)


def _units(codes: Sequence[tuple[str, str]]) -> list[_Unit]:
    """What is compiled, those that take longest first."""
    of_codes = [
        _Unit(
            name=f"codes_{i}",
            text=loaded.text_of(quantized.SOURCES),
            flags=quantized.FLAGS,
            macros={
                **quantized.definitions(*pair),
                "MOE_NAME(dtype)": f"{quantized.name_of(*pair)}_##dtype",
            },
        )
        for i, pair in enumerate(codes)
    ]
    names = (quantized.name_of(*pair).removeprefix("moe_experts_") for pair in codes)
    variants = (
        f"MOE_VARIANT({json.dumps(element)}, {json.dumps(inputs)}, {name})"
        for (element, inputs), name in zip(codes, names, strict=True)
    )
    macros = {"MOE_VARIANTS": " ".join(variants), "MOE_BUILT_FROM": f'"{loaded.built_from()}"'}
    text, hidden = (HERE / "library.cpp").read_text(), ("-fvisibility=hidden",)
    ops = _Unit(name="library", text=text, flags=hidden, macros=macros)
    plain = loaded.text_of(cpu.SOURCES)
    return [*of_codes, ops, _Unit(name="plain", text=plain, flags=cpu.FLAGS)]


def _compiled(unit: _Unit, scratch: Path, include: Sequence[str]) -> Path:
    source = scratch / f"{unit.name}.cpp"
    source.write_text(unit.source)
    return _run(unit.name, [source], scratch, [*unit.flags, *include], compile_only=True)


def _linked(objects: Sequence[Path], scratch: Path) -> Path:
    # It calls its own functions, whatever others have their names, and needs no Python.
    flags = ("-Wl,-Bsymbolic", "-Wl,--as-needed")
    return _run(loaded.LIBRARY, objects, scratch, flags, compile_only=False)


def _run(
    name: str, sources: Sequence[Path], scratch: Path, flags: Sequence[str], compile_only: bool
) -> Path:
    # They load Inductor, which takes seconds.
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    options = CppTorchDeviceOptions(
        vec_isa=pick_vec_isa(),
        device_type="cpu",
        extra_flags=tuple(flags),
        compile_only=compile_only,
    )
    builder = CppBuilder(
        name=name,
        sources=[shlex.quote(str(source)) for source in sources],
        BuildOption=options,
        output_dir=str(scratch),
    )
    builder.build()
    return Path(builder.get_target_file_path())
