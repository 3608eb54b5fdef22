"""What runs transformers' own tests: which are compared, what is changed, and that it can fail."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_ops
from tests.hf import families
from tests.peers import __main__ as peers
from tests.peers import moe_ops_peers as plugin

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("reported", "outcome"),
    [
        (["passed"], "passed"),
        (["passed", "failed"], "failed"),  # its teardown
        (["failed", "passed"], "failed"),  # a subtest, then the test that has it
        (["skipped", "passed"], "passed"),  # likewise
    ],
)
def test_one_failure_makes_a_test_fail(reported: list[str], outcome: str, tmp_path: Path) -> None:
    report = tmp_path / "report"
    lines = [{"test": "T::test_a", "outcome": o, "calls": 3} for o in reported]
    other = {"test": "T::test_b", "outcome": "passed", "calls": 0}
    report.write_text("".join(json.dumps(line) + "\n" for line in [*lines, other]))
    assert peers.read(report) == {"T::test_a": (outcome, 3), "T::test_b": ("passed", 0)}


@pytest.mark.parametrize(
    ("stock", "ours", "worse"),
    [
        ("passed", "failed", True),
        ("passed", "skipped", True),
        ("passed", "passed", False),
        ("failed", "failed", False),
        ("skipped", "failed", False),
        ("failed", "passed", False),
    ],
)
def test_only_what_passes_without_us_must_pass(stock: str, ours: str, worse: bool) -> None:
    found = peers.worse_than({"test_a": (stock, 0)}, {"test_a": (ours, 1)})
    assert found == (["test_a"] if worse else [])


def test_forwards_and_generate_are_compiled_and_what_compiles_itself_is_not() -> None:
    assert plugin.is_compiled_test("test_model")
    assert plugin.is_compiled_test("test_generate_with_static_cache")
    assert plugin.is_compiled_test("test_batching_equivalence")
    for name in ("test_model_parallelism", "test_generate_compilation_all_outputs", "test_config"):
        assert not plugin.is_compiled_test(name)


def test_the_outermost_model_alone_is_changed() -> None:
    changed: list[str] = []
    cls = families.model_class("qwen3_moe")
    outer, inner = cls, type(families.build("qwen3_moe").model.model)
    before = outer.__init__, inner.__init__
    try:
        for each in (outer, inner):
            each.__init__ = plugin.changed_init(
                each.__init__, lambda m: changed.append(type(m).__name__)
            )
        families.build("qwen3_moe")
        inner(families.tiny_config(cls.config_class))
    finally:
        outer.__init__, inner.__init__ = before
    assert changed == ["Qwen3MoeForCausalLM", "Qwen3MoeModel"]


def test_calls_without_gradients_go_to_a_twin_that_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def compile(model: Any) -> Any:
        twin = copy.copy(model)
        twin._compiled_call_impl = lambda *args, **kwargs: f"twin {len(made)}"
        made.append(twin)
        return twin

    monkeypatch.setattr(moe_ops, "compile", compile)
    model = families.build("qwen3_moe").model
    plugin.compile_calls(model)
    ids = torch.arange(5)[None]
    assert not made
    with torch.no_grad():
        assert [model(ids), model(ids)] == ["twin 1", "twin 1"]
        model.train()
        assert model(ids) == "twin 2"
        model.resize_token_embeddings(50)
        assert model(ids) == "twin 3"
    assert model(ids).logits.requires_grad
    assert len(made) == 3


CHECKOUT = """
import torch
from transformers import MixtralConfig, MixtralForCausalLM

def build():
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_local_experts": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval()

class TestMixtral:
    def test_logits(self):
        with torch.no_grad():
            assert build()(torch.arange(4)[None]).logits.shape == (1, 4, 9)

    def test_implementation(self):
        assert build().config._experts_implementation != "moe_ops"
"""


@pytest.mark.slow
@pytest.mark.every
def test_a_test_that_fails_with_us_alone_is_named(tmp_path: Path) -> None:
    test = tmp_path / peers.path_of("mixtral")
    test.parent.mkdir(parents=True)
    test.write_text(CHECKOUT)
    command = [sys.executable, "-m", "tests.peers", str(tmp_path), "--modes", "optimize"]
    for more, code in (([], 1), (["-k", "test_logits"], 0)):
        done = subprocess.run(
            [*command, "--families", "mixtral", *more],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        last = done.stdout.splitlines()[-1].split()
        want = ["2", "1", "1", "TestMixtral::test_implementation"] if code else ["1", "1", "1", "-"]
        assert last == ["mixtral", "optimize", *want]


def test_a_folder_without_the_tests_is_refused(tmp_path: Path, capsys: Any) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sys, "argv", ["peers", str(tmp_path)])
        peers.parsed()
    assert "give the folder of a checkout of huggingface/transformers" in capsys.readouterr().err
