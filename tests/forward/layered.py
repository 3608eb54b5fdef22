"""Twins whose forward runs layer by layer, with nothing compiled and a stand-in for captures."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor

import moe_ops
from moe_ops.arena import Arena
from moe_ops.forward.by_layers import ByLayers
from moe_ops.forward.captured import Forwards
from moe_ops.forward.kept import kept_of
from moe_ops.forward.layer_cache import CACHE
from moe_ops.forward.regions import ByKind, Region
from moe_ops.passes.inductor.compiled import Compiled
from moe_ops.testing import F32, TOL, assert_close
from tests.graphs.recorder import Recorder

MODEL = TOL["model", F32]


class Layered:
    """A model, its twin, and how the twin ran: `whole` counts calls as one graph, `layers` those of
    layers by kind."""

    def __init__(self, model: Any, graphs: Any = None) -> None:
        self.model = model
        self.twin = moe_ops.compile(model)
        compiled = self.twin._compiled_call_impl
        assert isinstance(compiled, Compiled)
        self.graphs = graphs or Recorder()
        self.forwards = Forwards(arena=Arena(), capture=self.graphs)
        self.layers: Counter[str] = Counter()
        self.whole = 0
        compiled.by_layers = ByLayers(self.twin, ByKind("layer", self._counting), self.forwards)

        def as_one_graph(*args: Any, **kwargs: Any) -> Any:
            self.whole += 1
            return compiled.function(*args, **kwargs)

        compiled.call = as_one_graph

    def _counting(self, region: Region) -> Region:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.layers[region.__code__.co_name] += 1
            return region(*args, **kwargs)

        return call

    def __call__(self, **kwargs: Any) -> Any:
        """What the twin gives, which has to be what the model gives."""
        with torch.no_grad():
            want = self.model(**{n: copied(x) if n == CACHE else x for n, x in kwargs.items()})
            got = self.twin(**kwargs)
        mask = kwargs.get("attention_mask")
        check_output(got, want, None if mask is None or mask.dim() != 2 else mask)
        return got


def check_output(got: Any, want: Any, mask: Tensor | None = None) -> None:
    """The same names, close tensors where a mask hides nothing, and caches of the same lengths."""
    assert type(got) is type(want)
    assert list(got) == list(want)
    for name in want:
        a, b = got[name], want[name]
        if isinstance(b, Tensor):
            if mask is not None and b.dim() == 3:
                seen = mask[:, -b.shape[1] :].bool()
                a, b = a[seen], b[seen]
            assert_close(a, b, MODEL, name)
    a, b = got.get(CACHE), want.get(CACHE)
    assert type(a) is type(b)
    if b is not None:
        check_cache(a, b, mask)


def check_cache(got: Any, want: Any, mask: Tensor | None = None) -> None:
    assert [type(layer) for layer in got.layers] == [type(layer) for layer in want.layers]
    assert got.get_seq_length() == want.get_seq_length()
    for a, b in zip(got.layers, want.layers, strict=True):
        for name in ("keys", "values"):
            mine, theirs = getattr(a, name, None), getattr(b, name, None)
            assert (mine is None) == (theirs is None)
            if theirs is None:
                continue
            assert mine.shape == theirs.shape
            if mask is not None:
                seen = mask[:, -theirs.shape[2] :].bool()
                mine, theirs = (x.transpose(1, 2)[seen] for x in (mine, theirs))
            assert_close(mine, theirs, MODEL, name)
        mine, theirs = kept_of(a), kept_of(b)
        assert mine.keys() == theirs.keys()
        for name in theirs.keys() - {"keys", "values"} if mask is None else ():
            assert_close(mine[name], theirs[name], MODEL, name)


def copied(cache: Any) -> Any:
    """A cache of its own with the same tokens."""
    return copy.deepcopy(cache)


def tokens(B: int, S: int, seed: int = 0) -> Tensor:
    return torch.randint(16, 90, (B, S), generator=torch.Generator().manual_seed(seed))


def left_padded(B: int, S: int, *pads: int) -> Tensor:
    """A mask that hides so many tokens at the start of each sequence."""
    mask = torch.ones(B, S, dtype=torch.long)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    return mask
