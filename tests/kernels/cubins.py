"""What a compiled kernel needs, and the instructions in it, read from its cubin."""

from __future__ import annotations

import re
import subprocess
import tempfile

from triton import knobs


def usage(cubin: bytes) -> dict[str, int]:
    """Registers of a kernel, and the bytes of memory a thread needs for what they do not hold."""
    said = _dumped(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    assert found is not None, said
    return {"registers": int(found[1]), "spilled": int(found[2]) + int(found[3])}


def waits_of(cubin: bytes) -> dict[str, int]:
    """Instructions of the matrix unit, and those that wait for it."""
    # Triton's own `asm["sass"]` leaves out part of a kernel of several warpgroups.
    sass = _dumped(cubin, "-sass")
    return {
        "products": len(re.findall(r"\b[HQI]GMMA\.", sass)),
        "waits": sass.count("WARPGROUP.DEPBAR"),
    }


def nans_of_zeros(cubin: bytes) -> int:
    """Codes of float8 that are constants to ptxas, which takes zeros among them for NaN."""
    return len(re.findall(r"E4M3\.UNPACK_B \w+, [+-]?QNAN", _dumped(cubin, "-sass")))


def _dumped(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
