"""docs/FORMATS.md says which checkpoints can be loaded, by loads of each."""

import difflib
import re
from collections.abc import Callable
from pathlib import Path

import expecttest
import pytest

from tests.docs.checkpoints import HEAD, MODEL, SAME, WORKS, Kind, gguf_kinds, kinds, of_model
from tests.docs.formats import table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "FORMATS.md"
REMEDY = "run `make golden` if it should, and read the difference"


def filled(page: str, name: str, rows: list[Kind]) -> str:
    block = re.compile(rf"<!-- loads {name} -->\n.*?<!-- end of loads -->", re.DOTALL)
    made = table(HEAD, [kind.row for kind in rows])
    new, count = block.subn(
        lambda _: f"<!-- loads {name} -->\n\n{made}\n\n<!-- end of loads -->", page
    )
    assert count == 1, f"the page wants the table {name} once, and has it {count} times"
    return new


@pytest.mark.parametrize(
    ("name", "rows"), [("safetensors", kinds), ("gguf", gguf_kinds)], ids=["safetensors", "gguf"]
)
def test_the_page_says_what_loads(name: str, rows: Callable[[], list[Kind]]) -> None:
    if name == "gguf":
        pytest.importorskip("gguf")
    page = PAGE.read_text()
    new = filled(page, name, rows())
    if expecttest.ACCEPT:
        PAGE.write_text(page := new)
    lines = difflib.ndiff(page.splitlines(), new.splitlines())
    changed = "\n".join(line for line in lines if line.startswith(("- ", "+ ")))
    assert not changed, f"docs/FORMATS.md does not say what loads do; {REMEDY}:\n{changed}"


def test_a_cell_is_what_a_load_does() -> None:
    """A layer of another format is refused with the words of the error."""
    found = {kind.name: kind for kind in kinds()}
    gptq, fp8 = found["GPTQ, 4 bits, symmetric"], found["FP8 in blocks"]
    assert gptq.row[2:] == (WORKS, WORKS, WORKS, WORKS)
    other = Kind(name="other", write=gptq.write, quant=fp8.quant).row[2:]
    assert other[0] == MODEL and other[2:] == (SAME, SAME)
    assert other[1].startswith(
        "refused: GPTQ holds integers of 4 bits, but the layer has float8_e4m"
    )


def test_weights_that_are_not_those_of_the_checkpoint_are_found() -> None:
    kind = next(k for k in kinds() if k.name == "AWQ")

    def wrong(folder: Path) -> dict[str, object]:
        values = kind.write(folder)
        values["w2"][1, 2, 3] += 1
        return values

    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        Kind(name="wrong", write=wrong, quant=kind.quant).row  # noqa: B018
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        of_model(wrong)()
