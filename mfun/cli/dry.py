"""`mfun train --dry`: everything about a run that is known before it starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from rich.console import Console

from mfun import config as cfg
from mfun.cli.text import count, numbers, ranks_text, size
from mfun.config import Config
from mfun.grads import Reduction, explain
from mfun.grads import normalise as normalisation
from mfun.mesh import FAMILIES
from mfun.nn.layer import Layer
from mfun.plan.memory import account
from mfun.schedule import simulate_time, timeline
from mfun.spec import ParamSpec, local_shape
from mfun.train.memory import in_flight
from mfun.train.plan import Plan, plan, streams

GROUPS_SHOWN = 4
BUCKETS_SHOWN = 4
COLUMNS = 150
"""Width of a timeline: a longer one is drawn with fewer microbatches."""


def show(config: Config, console: Console) -> None:
    """Print a resolved configuration's layout.

    Args:
        config: resolved.
        console: where.
    """
    layout = plan(config)
    parts = {
        "configuration": lambda: cfg.to_toml(config).rstrip().splitlines(),
        "mesh": lambda: mesh_lines(layout),
        "parameters": lambda: parameter_lines(layout),
        "gradients": lambda: gradient_lines(layout),
        "op stream": lambda: stream_lines(layout),
        "memory": lambda: memory_lines(layout),
    }
    for number, (title, lines) in enumerate(parts.items()):
        if number:
            console.print()
        console.print(f"[bold]{title}[/bold]")
        for line in lines():
            console.print(f"  {line}".rstrip(), markup=False)


def mesh_lines(layout: Plan) -> Iterator[str]:
    """Sizes, stages and groups."""
    mesh = layout.mesh
    yield f"{ranks_text(layout.config)}, numbered {mesh.order}"
    for stage, ranks in zip(layout.stages, map(mesh.stage_ranks, range(mesh.pp)), strict=True):
        names = [_layers_text(chunk) for chunk in stage.chunks]
        yield f"stage {stage.index}: ranks {numbers(ranks)}: {' and '.join(names)}"
    seen: set[Any] = set()
    for name, axes in FAMILIES.items():
        groups = mesh.groups(*axes)
        if len(groups[0]) > 1 and groups not in seen:
            seen.add(groups)
            yield f"group {name}: {_groups_text(groups)}"


def _groups_text(groups: tuple[tuple[int, ...], ...]) -> str:
    shown = " ".join("{" + numbers(g) + "}" for g in groups[:GROUPS_SHOWN])
    rest = len(groups) - GROUPS_SHOWN
    return shown + (f" and {rest} more of {len(groups[0])}" if rest > 0 else "")


def parameter_lines(layout: Plan) -> Iterator[str]:
    """Each parameter's whole and local shape, and how it is cut; equal blocks in one line."""
    specs = layout.specs
    total = sum(spec.numel for spec in specs.values())
    flops = cfg.flops_per_token(layout.config.model).total
    yield f"{count(total)} in all ({total}), {count(flops, 'FLOP')} a token and step"
    rows = [
        (path, str(spec), f"local {[*local_shape(spec, layout.mesh)]}")
        for path, spec in folded(specs, layout).items()
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    for path, spec, local in rows:
        yield f"{path:<{widths[0]}}  {spec:<{widths[1]}}  {local}"


def gradient_lines(layout: Plan) -> Iterator[str]:
    """What happens to each gradient, and the flat buffers."""
    table = {
        label: attrs.evolve(layout.table[path], path=label)
        for label, path in _labels(layout.specs, layout).items()
    }
    note = normalisation.explain(layout.config.train.loss_norm)
    yield from explain(table, note).splitlines()
    for stage in distinct_stages(layout):
        grads = layout.buffers(stage[0])
        yield f"stage {numbers(stage)}: {len(grads.buckets)} buffers of {layout.grad_dtype}"
        for bucket in grads.buckets[:BUCKETS_SHOWN]:
            first = bucket.spans[0].path
            leaves = f"{len(bucket.spans)} parameter{'s' * (len(bucket.spans) > 1)}"
            yield f"  {count(bucket.size)} elements, {leaves}, {_over(layout.table[first])}"
        if len(grads.buckets) > BUCKETS_SHOWN:
            yield f"  and {len(grads.buckets) - BUCKETS_SHOWN} more"


def _layers_text(layers: Sequence[Layer]) -> str:
    """What a chunk holds: `embedding, blocks 0-3`."""
    halves = [x.name.split(".")[1] for x in layers if x.name.startswith("blocks.")]
    blocks = sorted(set(map(int, halves)))
    names = ["embedding"] * any(x.name == "embed" for x in layers)
    names += [f"blocks {numbers(blocks)}"] * bool(blocks)
    names += ["head"] * any(x.name == "head" for x in layers)
    return ", ".join(names) or "no layers"


def _over(row: Reduction) -> str:
    axes = ", ".join(map(str, row.axes))
    stages = f"stages {numbers(row.joined)}" if row.joined else ""
    together = " and ".join(filter(None, (axes, stages)))
    return f"all-reduced over {together}" if together else "kept"


def stream_lines(layout: Plan) -> Iterator[str]:
    """The picture of the schedule, and its bubble."""
    config, stages = layout.config, layout.mesh.pp
    name, sizes = cfg.schedule_name(config), cfg.microbatch_sizes(config)
    row, given = cfg.schedule(config)
    place = row.place(given)
    idle = simulate_time(layout.streams, place=place).idle
    yield (
        f"{name}, {stages} stage{'s' * (stages > 1)}, {len(sizes)} microbatches of "
        f"{numbers(sorted(set(sizes)))} sequences a rank; idle {idle:.1%} if B takes twice F"
    )
    drawn = min(len(sizes), max(2 * stages + 2, COLUMNS // 6 - stages))
    if drawn < len(sizes):
        yield f"drawn with {drawn} microbatches:"
    yield from timeline(streams(config, drawn), place=place).splitlines()


def memory_lines(layout: Plan) -> Iterator[str]:
    """Bytes of a rank of each stage."""
    yield "a rank's, by formula (mfun/plan/memory.py): the most at once; see also mfun plan"
    for stages in distinct_stages(layout):
        m = account(layout, stages[0])
        yield (
            f"stage {numbers(stages)}: {size(m.total)} = parameters {size(m.params)} + gradients "
            f"{size(m.grads)} + optimizer {size(m.opt)} + activations and temporaries "
            f"{size(m.working)} ({m.in_flight} in flight)"
        )


def folded(specs: Mapping[str, ParamSpec], layout: Plan) -> dict[str, ParamSpec]:
    """Specs by label: blocks whose leaf has one spec and one reduction share a line."""
    return {label: specs[path] for label, path in _labels(specs, layout).items()}


def _labels(specs: Mapping[str, ParamSpec], layout: Plan) -> dict[str, str]:
    """Label -> one path it stands for: `blocks.0-7.attn.out`."""
    blocks: dict[Any, list[int]] = {}
    paths: dict[Any, str] = {}
    for path, spec in specs.items():
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", path)
        row = layout.table[path]
        key = (match[2], spec, row.axes, row.rows) if match else path
        paths.setdefault(key, path)
        blocks.setdefault(key, []).extend([int(match[1])] if match else [])
    return {
        f"blocks.{numbers(blocks[key])}.{key[0]}" if blocks[key] else path: path
        for key, path in paths.items()
    }


def distinct_stages(layout: Plan) -> list[list[int]]:
    """Stages with equal parameters, place and activations in flight, together."""
    found: dict[Any, list[int]] = {}
    for stage in layout.stages:
        blocks = tuple(len(chunk) for chunk in stage.chunks)
        flight = max(in_flight(layout, stage.index))
        found.setdefault((blocks, flight, stage.first, stage.last), []).append(stage.index)
    return list(found.values())
