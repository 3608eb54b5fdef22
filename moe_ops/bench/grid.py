"""`bench layer --ours moe`, `bench op` and `bench report`: from options to printed tables."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from moe_ops.bench import cells, contenders, plot, report, stages, tables
from moe_ops.bench.rates import Rates, measure_rates
from moe_ops.bench.results import Results, dump, load, read_peers, write
from moe_ops.planning.cost import processor
from moe_ops.shapes import DTYPES
from moe_ops.testing import LAYERS, Case


def measure_layers(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure and print layer by layer; what is known so far is written after each."""
    if args.plot:
        plot.pyplot()  # raises before anything is measured
    others = [name for name in args.against if name != contenders.OURS]
    device = torch.device(args.device)

    def contenders_of(case: Case) -> list[contenders.Contender]:
        ours = contenders.ours(case, device.type, backend=args.backend)
        return [ours, *(contenders.contender(case, device.type, name) for name in others)]

    grid = cells.Grid(
        layers=[LAYERS[name] for name in args.layer],
        tokens=args.tokens,
        routings=args.routing,
        contenders=contenders_of,
        dtype=DTYPES[args.dtype],
        device=device,
        seconds=args.seconds,
    )
    peers, floors = read_peers(Path(args.peers)) if args.peers else ({}, {})
    contenders_of(grid.layers[0])  # names a backend that is not there before anything is measured
    rates = _rates(args)
    results = Results(
        command=command,
        device=device_name(device),
        dtype=args.dtype,
        versions=versions(any(name in contenders.STOCK for name in others)),
        rates=rates,
        given=args.rates,
        layers={case.name: case for case in grid.layers},
        peers={name: peers[name] for name in args.layer if name in peers},
        peer_floors={name: floors[name] for name in args.layer if name in floors},
    )
    per_layer = len(grid.tokens) * len(grid.routings) * (1 + len(others))
    for cell in cells.measure(grid, rates, args.rates):
        results.cells.append(cell)
        if len(results.cells) % per_layer == 0:
            print(tables.layer_table(results, cell.layer), end="\n\n", flush=True)
            if args.json:
                write(Path(args.json), dump(results))
    print(tables.summary(results))
    if args.plot:
        plot.draw(results, Path(args.plot))
    return dump(results)


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


def print_report(args: argparse.Namespace) -> dict[str, Any]:
    """Print a file of results as Markdown, and draw it if asked."""
    results = load(Path(args.file))
    print(report.section(results))
    if args.plot:
        plot.draw(results, Path(args.plot))
    return {}


def _rates(args: argparse.Namespace) -> Rates:
    device = torch.device(args.device)
    rates = measure_rates(device, DTYPES[args.dtype])
    given = f"; given: {args.rates}" if args.rates else ""
    print(f"{device_name(device)}, {args.dtype}: {rates}{given}\n", flush=True)
    return rates


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return processor() or platform.processor() or platform.machine()


def versions(transformers: bool) -> dict[str, str]:
    """Of the packages that have a part in the times."""
    found = {"torch": str(torch.__version__)}
    names: Sequence[str] = ("triton", "transformers") if transformers else ("triton",)
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # Triton is there only where torch can use it
    return found
