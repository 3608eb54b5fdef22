"""`bench layer --ours moe`, `bench op` and `bench report`: from options to printed tables."""

from __future__ import annotations

import argparse
import itertools
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from moe_ops.bench import (
    cells,
    contenders,
    formats,
    humming,
    plot,
    report,
    resume,
    stages,
    tables,
    tiles,
)
from moe_ops.bench.rates import Rates, measure_rates
from moe_ops.bench.results import Results, dump, load, read_peers, write
from moe_ops.checks.shapes import DTYPES
from moe_ops.planning.cost import processor
from moe_ops.testing import LAYERS, Case


def measure_layers(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure and print layer by layer what the file of --json does not hold; what is known so far
    is written after each number of tokens.
    """
    if args.plot:
        plot.pyplot()  # raises before anything is measured
    grid = grid_of(args)
    # Names a backend that is not there before anything is measured.
    wanted = [key for case in grid.layers for key in keys_of(grid, case)]
    path = Path(args.json) if args.json else None
    same = conditions_of(args, grid)
    earlier = resume.before(path, same, grid.layers) if path else None
    peers, floors = read_peers(Path(args.peers)) if args.peers else ({}, {})
    done = frozenset() if earlier is None else resume.timed(earlier)
    missing = [key for key in wanted if key not in done]
    eight = formats.eight_bit(grid.quant)
    rates = _rates(args, eight) if missing or earlier is None else earlier.rates
    results = Results(
        command=command,
        rates=rates,
        layers={case.name: case for case in grid.layers},
        peers={name: peers[name] for name in args.layer if name in peers},
        peer_floors={name: floors[name] for name in args.layer if name in floors},
        **same,
    )
    if earlier is not None:
        results = resume.joined(earlier, results, frozenset(missing))
    _fill(results, replace(grid, done=done), missing, path)
    print(tables.summary(results))
    if args.plot:
        plot.draw(results, Path(args.plot))
    return dump(results)


def grid_of(args: argparse.Namespace) -> cells.Grid:
    """What the options ask for. Raises ValueError for a backend that is not there."""
    device = torch.device(args.device)
    others = [name for name in args.against if name != contenders.OURS]

    def contenders_of(case: Case) -> list[contenders.Contender]:
        ours = contenders.ours(case, device.type, backend=args.backend)
        return [ours, *(contender(case, device.type, name) for name in others)]

    return cells.Grid(
        layers=[LAYERS[name] for name in args.layer],
        tokens=args.tokens,
        routings=args.routing,
        contenders=contenders_of,
        dtype=DTYPES[args.dtype],
        device=device,
        seconds=args.seconds,
        quant=args.format,
    )


def contender(case: Case, device: str, name: str) -> contenders.Contender:
    """The contender of a name: transformers' experts, FlashInfer's function, Humming's products, or
    our op on a backend. Raises ValueError for a backend that is not there."""
    if name == humming.NAME:
        return humming.humming(case)
    if name == contenders.DIRECT:
        return contenders.direct(case)
    if name in contenders.STOCK:
        return contenders.stock(case, name)
    return contenders.ours(case, device, name, name)


def keys_of(grid: cells.Grid, case: Case) -> list[cells.Key]:
    """All cells of a layer, whether they are done or not."""
    names = [contender.name for contender in grid.contenders(case)]
    places = itertools.product(grid.tokens, grid.routings, names)
    return [(case.name, *place) for place in places]


def conditions_of(args: argparse.Namespace, grid: cells.Grid) -> dict[str, Any]:
    """Fields of `Results` in which the runs of one file do not differ."""
    stock = any(name in contenders.STOCK for name in args.against)
    return {
        "device": device_name(grid.device),
        "dtype": args.dtype,
        "format": formats.spelled(grid.quant),
        "versions": versions(stock),
        "given": args.rates,
        "backend": args.backend,
        "seconds": args.seconds,
    }


def _fill(
    results: Results, grid: cells.Grid, missing: Sequence[cells.Key], path: Path | None
) -> None:
    """Measure what is missing, and print each layer as soon as it is whole."""
    left = Counter((layer, tokens) for layer, tokens, *_ in missing)
    left_of_layer = Counter(layer for layer, *_ in missing)
    for case in grid.layers:
        if not left_of_layer[case.name]:
            print(tables.layer_table(results, case.name), end="\n\n", flush=True)
    for cell in cells.measure(grid, results.rates, results.given):
        results.cells.append(cell)
        left[cell.layer, cell.tokens] -= 1
        left_of_layer[cell.layer] -= 1
        if left[cell.layer, cell.tokens]:
            continue
        if results.earlier_rates:
            resume.sort(results)
        if path is not None:
            write(path, dump(results))
        if not left_of_layer[cell.layer]:
            print(tables.layer_table(results, cell.layer), end="\n\n", flush=True)


def measure_stages(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print the stages of layers."""
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    for backend in args.backend:
        contenders.ops_with(backend, device.type)
    rates = _rates(args)
    cases = [LAYERS[name] for name in args.layer]
    found = list(stages.measure(cases, args.tokens, dtype, device, rates, args.backend))
    print(stages.table(found))
    return {
        "device": device_name(device),
        "dtype": args.dtype,
        "versions": versions(False),
        "rates": asdict(rates),
        "layers": {case.name: asdict(case) for case in cases},
        "cells": [asdict(cell) for cell in found],
    }


def measure_tiles(args: argparse.Namespace) -> dict[str, Any]:
    """Measure and print tiles, by layer and number of tokens."""
    device, found = torch.device(args.device), []
    rates = _rates(args, formats.eight_bit(args.format))
    for name in args.layer:
        case = LAYERS[name]
        turning = cells.Grid(
            layers=[case],
            tokens=args.tokens,
            routings=["uniform"],
            contenders=lambda _: [],
            dtype=DTYPES[args.dtype],
            device=device,
            quant=args.format,
        )
        for tokens in args.tokens:
            tried = tiles.measure(
                turning, rates, case, tokens, args.kernel, args.product, args.most
            )
            print(tiles.table(case, tokens, turning, tried), end="\n\n", flush=True)
            found.append({"layer": name, "tokens": tokens, "tried": [asdict(t) for t in tried]})
    return {
        "device": device_name(device),
        "dtype": args.dtype,
        "format": formats.spelled(args.format),
        "versions": versions(False),
        "found": found,
    }


def print_report(args: argparse.Namespace) -> dict[str, Any]:
    """Print a file of results as Markdown, and draw it if asked."""
    results = load(Path(args.file))
    print(report.section(results))
    if args.plot:
        plot.draw(results, Path(args.plot))
    return {}


def _rates(args: argparse.Namespace, eight_bit: bool = False) -> Rates:
    device = torch.device(args.device)
    rates = measure_rates(device, DTYPES[args.dtype], eight_bit)
    if eight_bit and rates.matmul8_tflops is None:  # a device that has no such product
        rates = replace(rates, matmul8_tflops=args.rates.matmul8_tflops)
    given = f"; given: {args.rates}" if args.rates else ""
    print(f"{device_name(device)}, {args.dtype}: {rates}{given}\n", flush=True)
    return rates


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return processor() or platform.processor() or platform.machine()


def versions(transformers: bool) -> dict[str, str]:
    """The versions of the packages that have a part in the times."""
    found = {"torch": str(torch.__version__)}
    peers = ("flashinfer-python", "humming-kernels", *(("transformers",) if transformers else ()))
    for name in ("triton", *peers):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # Triton is there only where torch can use it, peers where they were wanted
    return found
