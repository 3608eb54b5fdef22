"""Who holds which experts, in how many bytes, and how even the work is: a plan for a cluster.

    python examples/expert_parallel_plan.py --model DeepseekV3Config --dp 8 --tp 4 --redundant 32
    python examples/expert_parallel_plan.py --experts 64 --layers 16 --hidden 2048 --width 1024 \
        --top-k 8 --tp 8 --routing uniform --plot plan.png

--model is a configuration class of transformers, whose defaults are taken, or a folder with a
config.json; plain numbers override it, or stand for it. One layer is shown rank by rank, loads in
units of the mean rank's: as experts are placed when a model is loaded, and once they are rebalanced
for the given routing. Each layer has hot experts of its own.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ops.installed import require_transformers
from moe_ops.parallel.config import ParallelConfig
from moe_ops.parallel.expert_map import PLACEMENTS, ExpertPlacement, place
from moe_ops.parallel.load_balance import Rebalanced, rank_loads, rebalance
from moe_ops.parallel.replicas import ExpertReplicas

GIB = 2**30
# How transformers' configurations call what we need, the first that is there.
NAMES = {
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "width": ("moe_intermediate_size", "intermediate_size"),
    "top_k": ("num_experts_per_tok", "moe_topk"),
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of the MoE layers of a model."""

    experts: int
    layers: int
    hidden: int
    width: int
    top_k: int
    shared: int = 0  # in experts of the same width
    groups: int = 1

    @classmethod
    def of(cls, config: Any) -> Model:
        """From a configuration of transformers; layers without experts are left out."""
        found = {}
        for field, names in NAMES.items():
            values = [v for name in names if (v := getattr(config, name, None)) is not None]
            if not values:
                raise ValueError(f"{type(config).__name__} has none of {', '.join(names)}")
            found[field] = values[0]
        dense = getattr(config, "first_k_dense_replace", None) or 0
        dense += len(getattr(config, "mlp_only_layers", None) or ())
        found["layers"] = (found["layers"] - dense) // (
            getattr(config, "decoder_sparse_step", None) or 1
        )
        shared = (getattr(config, "shared_expert_intermediate_size", None) or 0) // found["width"]
        return cls(
            **found,
            shared=getattr(config, "n_shared_experts", None) or shared,
            groups=getattr(config, "n_group", None) or 1,
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A model on a cluster; placements of every rank, and the loads of every rank and layer."""

    model: Model
    placements: list[ExpertPlacement]
    shard: float  # of each expert, on each rank
    bits: int
    held: list[int]  # the logical expert in each slot, rank by rank, as placed
    balanced: Rebalanced
    placed_LN: Tensor
    balanced_LN: Tensor

    def gib(self, experts: int) -> float:
        """The weights of so many experts of one layer, on one rank; scales and biases not counted.

        An expert has a gate, an up and a down projection.
        """
        one = 3 * self.model.hidden * self.model.width * self.bits / 8
        return experts * one * self.shard / GIB

    def gib_of(self, here: ExpertPlacement) -> float:
        """The weights of the routed experts of a rank, in all layers."""
        return self.gib(here.num_local) * self.model.layers

    def gib_shared(self) -> float:
        """The weights of the shared experts, which every rank has, in all layers."""
        return self.gib(self.model.shared) * self.model.layers


def routing(kind: str, layers: int, experts: int) -> Tensor:
    """The expected share of the pairs that go to each expert, [layers, experts]."""
    generator = torch.Generator().manual_seed(0)
    if kind == "uniform":
        return torch.ones(layers, experts, dtype=torch.float64)
    if kind == "random":
        return torch.rand(layers, experts, generator=generator, dtype=torch.float64)
    zipf = 1 / torch.arange(1, experts + 1, dtype=torch.float64)
    return torch.stack([zipf[torch.randperm(experts, generator=generator)] for _ in range(layers)])


def make_plan(model: Model, args: argparse.Namespace) -> Plan:
    """Place the experts on every rank of the cluster, then rebalance them."""
    configs = [
        ParallelConfig.of(
            dp=args.dp, tp=args.tp, dp_rank=dp, tp_rank=tp,
            expert_parallel=not args.shard_experts,
        )
        for dp in range(args.dp) for tp in range(args.tp)
    ]  # fmt: skip
    if args.shard_experts and args.redundant:
        raise ValueError("every rank holds a shard of every expert; leave out --redundant")
    first = place(
        model.experts, configs[0], placement=args.placement, redundant=args.redundant,
        num_groups=model.groups,
    )  # fmt: skip
    placements = [replace(first, config=config) for config in configs]
    loads = routing(args.routing, model.layers, model.experts)
    replicas = ExpertReplicas.initial(model.experts, args.redundant)
    held = replicas.physical_to_logical[first.physical_to_global].repeat(model.layers, 1)
    ranks = configs[0].ep_size
    by_node = {"nodes": args.nodes, "num_groups": model.groups} if args.hierarchical else {}
    balanced = rebalance(loads, held, ranks=ranks, **by_node)

    def in_means(physical_LP: Tensor) -> Tensor:
        loads_LN = rank_loads(loads, physical_LP, ranks)
        return (loads_LN / loads_LN.mean(1, keepdim=True)).expand(-1, max(ranks, len(configs)))

    return Plan(
        model=model, placements=placements, shard=1 / configs[0].tp_size, bits=args.bits,
        held=held[0].tolist(), balanced=balanced, placed_LN=in_means(held),
        balanced_LN=in_means(balanced.physical_to_logical),
    )  # fmt: skip


def ranges(ids: list[int]) -> str:
    """Ids in few characters: 0-8, or 3 17 41."""
    ids = sorted(ids)
    if len(ids) > 2 and ids == list(range(ids[0], ids[0] + len(ids))):
        return f"{ids[0]}-{ids[-1]}"
    text = " ".join(map(str, ids))
    return text if len(text) <= 40 else f"{text[:39].rpartition(' ')[0]} …"


def table(plan: Plan, nodes: int, layer: int) -> str:
    """One line a rank, and below how even all layers are."""
    owned: list[int] = plan.balanced.physical_to_logical[layer].tolist()
    lines = [
        f"{'rank':>4}{'node':>6}{'slots':>7}{'GiB':>9}{'load':>7}{'after':>7}  "
        f"{'experts':<42}experts after"
    ]
    for rank, here in enumerate(plan.placements):
        start = here.starts[here.config.ep_rank]
        mine = slice(start, start + here.num_local)
        lines.append(
            f"{rank:>4}{rank * nodes // len(plan.placements):>6}{here.num_local:>7}"
            f"{plan.gib_of(here) + plan.gib_shared():>9.3f}"
            f"{float(plan.placed_LN[layer, rank]):>7.2f}"
            f"{float(plan.balanced_LN[layer, rank]):>7.2f}  "
            f"{ranges(plan.held[mine]):<42}{ranges(owned[mine])}"
        )
    before, after = plan.balanced.before, plan.balanced.after
    moved = sum(len(moves.pairs) for moves in plan.balanced.moves)
    return "\n".join([
        *lines, "",
        f"highest load over mean, {len(before)} layers: "
        f"{float(before.mean()):.3f} as placed (worst {float(before.max()):.3f}), "
        f"{float(after.mean()):.3f} rebalanced (worst {float(after.max()):.3f})",
        f"rebalancing writes {moved} slots, {plan.gib(moved):.3f} GiB",
    ])  # fmt: skip


def draw(plan: Plan, layer: int, path: str) -> None:
    """Loads of every layer and rank, as placed and rebalanced; loads and bytes of one layer."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install 'torch-moe-ops[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(11, 6.5), layout="constrained")
    top = float(plan.placed_LN.max())
    panels = (("as placed", plan.placed_LN), ("rebalanced", plan.balanced_LN))
    for ax, (name, loads_LN) in zip(axes[0], panels, strict=True):
        # Blue is less than the mean, white the mean, red more.
        norm = matplotlib.colors.TwoSlopeNorm(1, 0, max(top, 1.01))
        image = ax.imshow(
            loads_LN.tolist(), aspect="auto", cmap="RdBu_r", norm=norm, interpolation="none"
        )
        ax.set(title=f"load of each rank, {name}", xlabel="rank", ylabel="layer")
    figure.colorbar(image, ax=axes[0], label="load, of the mean")
    ranks = range(len(plan.placements))
    ax = axes[1][0]
    ax.bar(ranks, plan.placed_LN[layer].tolist(), color="#c7c7c7", label="as placed")
    loads = plan.balanced_LN[layer].tolist()
    ax.step(ranks, loads, where="mid", marker="o", ms=3, label="rebalanced")
    ax.set(title=f"layer {layer}", xlabel="rank", ylabel="load, of the mean")
    ax.legend()
    ax = axes[1][1]
    routed = [plan.gib_of(here) for here in plan.placements]
    ax.bar(ranks, routed, color="C0", label="routed")
    if plan.model.shared:
        shared = [plan.gib_shared()] * len(routed)
        ax.bar(ranks, shared, bottom=routed, color="C1", label="shared")
        ax.legend(loc="upper right", ncols=2)
    ax.margins(y=0.2)
    ax.set(title="weights of all layers", xlabel="rank", ylabel="GiB")
    for ax in axes.flat:
        ax.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=120)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="configuration class of transformers, or a folder")
    for name in NAMES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="instead of the model's")
    parser.add_argument("--dp", type=int, default=1, help="data parallel ranks")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--nodes", type=int, default=1, help="machines that share the ranks")
    parser.add_argument("--shard-experts", action="store_true", help="no expert parallelism")
    parser.add_argument("--redundant", type=int, default=0, help="physical experts beyond logical")
    parser.add_argument("--placement", choices=PLACEMENTS, default=PLACEMENTS[0])
    parser.add_argument("--hierarchical", action="store_true", help="keep groups on one node")
    parser.add_argument("--routing", choices=("zipf", "random", "uniform"), default="zipf")
    parser.add_argument("--bits", type=int, default=16, help="of one weight")
    parser.add_argument("--layer", type=int, default=0, help="the one to show")
    parser.add_argument("--plot", metavar="FILE", help="also draw it (needs matplotlib)")
    return parser.parse_args(argv)


def find_model(args: argparse.Namespace) -> Model:
    """The model that the arguments name, with the numbers that they give."""
    given = {name: getattr(args, name) for name in NAMES if getattr(args, name) is not None}
    if args.model is None:
        missing = [f"--{name.replace('_', '-')}" for name in NAMES if name not in given]
        if missing:
            raise ValueError(f"give a --model, or also {', '.join(missing)}")
        return Model(**given)
    require_transformers("--model")
    import transformers

    if Path(args.model).is_dir():
        config = transformers.AutoConfig.from_pretrained(args.model)
    else:
        if not hasattr(transformers, args.model):
            raise ValueError(
                f"--model {args.model}: transformers has no such class, and there is no such "
                "folder; give for example Qwen3MoeConfig"
            )
        config = getattr(transformers, args.model)()
    return Model(**{**vars(Model.of(config)), **given})


def main(argv: list[str] | None = None) -> None:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        model = find_model(args)
        if not 0 <= args.layer < model.layers:
            raise ValueError(f"--layer {args.layer} must be from 0 to {model.layers - 1}")
        plan = make_plan(model, args)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    first = plan.placements[0]
    shared = f" and {model.shared} shared" if model.shared else ""
    print(
        f"{model.layers} layers of {model.experts} experts{shared}, top {model.top_k}, "
        f"{model.hidden} x {model.width}, {args.bits} bits a weight\n"
        f"{first.config.describe()}; {first.describe()}\n"
        f"routing: {args.routing}; layer {args.layer}:\n\n{table(plan, args.nodes, args.layer)}"
    )
    if args.plot:
        draw(plan, args.layer, args.plot)
        print(f"drawn in {args.plot}")


if __name__ == "__main__":
    main()
