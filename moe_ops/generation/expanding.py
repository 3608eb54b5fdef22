"""How a model's attention expands its latents, read in the source of its forward and tried on a few
numbers: whether a step may give its attention function the latents instead."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from moe_ops.interop.interrupts import let_through

METHOD, LINEAR, ASKED = "expand_kv", "kv_b_proj", "_attn_implementation"
SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")


def refusal(module: nn.Module) -> str | None:
    """Why a step has to expand the latents of an attention module that has `expand_kv`, or None."""
    linear: Any = getattr(module, LINEAR, None)
    sizes = [getattr(module, name, None) for name in SIZES]
    missing = [n for n, size in zip(SIZES, sizes, strict=True) if not isinstance(size, int)]
    if missing:
        return f"it has no {missing[0]}"
    if type(linear) is not nn.Linear or type(linear.weight) not in (Tensor, nn.Parameter):
        return f"its {LINEAR} is no plain linear layer, but {type(linear).__name__}"
    if linear.bias is not None or not linear.weight.is_floating_point():
        return f"its {LINEAR} is {linear.weight.dtype}, or has a bias"
    if linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear):
        return f"its {LINEAR} has hooks"
    if getattr(module, "num_key_value_groups", None) != 1:
        return "its heads share keys"
    nope, _, values, rank = sizes
    if linear.weight.shape[0] % (nope + values) or linear.weight.shape[1] != rank:
        return f"its {LINEAR} is {list(linear.weight.shape)}"
    if not expands(getattr(type(module), METHOD)):
        return f"its {METHOD} computes something else"
    return refusal_of_forward(inspect.unwrap(type(module).forward))


@functools.cache
def expands(method: Callable[..., Any]) -> bool:
    """Whether a method makes of latents the keys and values that we take it to, on a few numbers;
    from its module it may read only what ours knows of."""
    generator = torch.Generator().manual_seed(0)
    heads, nope, rope, V, R = 3, 4, 2, 5, 6

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    with torch.no_grad():
        weight_HNR, latents, rotated = (
            noise(heads, nope + V, R),
            noise(2, 1, 7, R),
            noise(2, 1, 7, rope),
        )
        module = SimpleNamespace(**dict(zip(SIZES, (nope, rope, V, R), strict=True)))
        setattr(module, LINEAR, lambda x: x @ weight_HNR.flatten(0, 1).T)
        made = latents @ weight_HNR.transpose(1, 2)
        keys = torch.cat([made[..., :nope], rotated.expand(-1, heads, -1, -1)], -1)
        try:
            got_keys, got_values = method(module, latents, rotated)
            return bool(
                torch.allclose(got_keys, keys, 1e-4, 1e-5)
                and torch.allclose(got_values, made[..., nope:], 1e-4, 1e-5)
            )
        except Exception as error:  # whatever it is that somebody's method misses or raises
            let_through(error)
            return False


@functools.cache
def refusal_of_forward(forward: Callable[..., Any]) -> str | None:
    """Why a forward may not get its latents back from `expand_kv` as they are, or None: it would
    have to have cached them before, and to do nothing with them but to call its attention."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError) as error:
        let_through(error)
        return "its forward has no source to look at"
    nodes = list(ast.walk(tree))
    calls = [n for n in nodes if isinstance(n, ast.Call)]
    made = [n for n in nodes if isinstance(n, ast.Assign) and called(n.value) == METHOD]
    if len(made) != 1 or sum(called(c) == METHOD for c in calls) != 1:
        return f"its forward does not call {METHOD} once, for keys and values"
    names = {n.id for t in made[0].targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    line = made[0].lineno
    updates = [c.lineno for c in calls if called(c) == "update"]
    if not updates or max(updates) >= line:
        return "its forward caches what was expanded"
    attention = [
        c for c in calls if isinstance(c.func, ast.Name) and is_attention(c.func.id, nodes)
    ]
    free = {id(a) for c in attention for a in (*c.args, *(k.value for k in c.keywords))}
    free |= {id(n.value) for n in nodes if isinstance(n, ast.Attribute) and n.attr == "shape"}
    for node in (n for n in nodes if isinstance(n, ast.Name) and n.id in names):
        if node.lineno > line and isinstance(node.ctx, ast.Load) and id(node) not in free:
            return f"its forward does more with {ast.unparse(node)} than to call its attention"
    return refusal_of_name(nodes, attention)


def refusal_of_name(nodes: list[ast.AST], attention: list[ast.Call]) -> str | None:
    """Why another name for the attention could change what a forward does, or None. It looks the
    name up; under others than "eager" and "sdpa" it may pass the chosen slots as `indices`, where
    under these it would hide all others."""
    asks = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr == ASKED]
    chooses = [
        n.left
        for n in nodes
        if isinstance(n, ast.Compare) and ast.unparse(n).endswith(f"{ASKED} in ('eager', 'sdpa')")
    ]
    if any(ast.unparse(n) != f"self.config.{ASKED}" for n in asks):
        return "its forward does not look its attention up in self.config"
    if len(asks) - len(chooses) != 1:
        return "its forward does more with the name of its attention than look it up"
    if chooses and not all("indices" in {k.arg for k in c.keywords} for c in attention):
        return "its forward does not tell its attention which slots it chose"
    return None


def called(node: ast.AST) -> str | None:
    """The name of the method that an expression calls, or None."""
    method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if method else None  # type: ignore[attr-defined]


def is_attention(name: str, nodes: list[ast.AST]) -> bool:
    """Whether a name is what the forward found in transformers' table."""
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in {ast.unparse(t) for t in targets}:
                return "ALL_ATTENTION_FUNCTIONS" in ast.unparse(node.value)
    return False
