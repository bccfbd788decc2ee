"""A drawing of who computes what: hosts, ranks, devices, replicas and stages, and where gradients meet. Pure.

Each rank is one line and each device a box; an arrow is what one stage sends to the next. Devices are counted within
their rank: whether they are GPUs is known on the host only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from mxdist.spec import (
    Compression,
    EvaluationJob,
    Inside,
    Parallelism,
    PipelineSchedule,
    Strategy,
    TrainingJob,
)

_SHOWN = 12
_SCHEDULES = {PipelineSchedule.GPIPE: "GPipe", PipelineSchedule.ONE_F_ONE_B: "1F1B"}


def draw(job: TrainingJob | EvaluationJob, hosts: Sequence[str]) -> list[str]:
    """Return the lines of the drawing.

    :param hosts: the host of each rank.
    """
    layout = job.parallelism
    lines = [f"layout      {_summary(job)}"]
    boxes = [_boxes(job, rank) for rank in range(len(hosts))]
    names = list(dict.fromkeys(hosts))
    for host, ranks in groupby(enumerate(hosts), key=lambda pair: pair[1]):
        lines.append(f"  host {host}")
        here = [f"    rank {rank:<4} {boxes[rank]}" for rank, _ in ranks]
        lines += here[:_SHOWN]
        lines += [f"    and {len(here) - _SHOWN} more in the same way"] if len(here) > _SHOWN else []
        lines += [f"    {name}" for name in _beside(layout, names.index(host), len(names))]
    if isinstance(job, TrainingJob) and job.model is not None:
        lines += [f"  {name:<10}{text}" for name, text in _notes(job, layout)]
    return lines


def _summary(job: TrainingJob | EvaluationJob) -> str:
    layout = job.parallelism
    if isinstance(job, EvaluationJob):
        return "one process"
    ranks = _count(layout.world_size, "rank")
    if job.script is not None:
        return f"{ranks}; what each does is the script's affair"
    if layout.world_size * layout.devices_per_rank == 1 and layout.strategy is not Strategy.PARAMETER_SERVER:
        return "one rank on one device"
    inside = f", inside {layout.inside.value}" if layout.inside else ""
    parts = [f"{layout.strategy.value}{inside}: {ranks}"]
    if layout.devices_per_rank > 1:
        parts.append(f"{layout.devices_per_rank} devices{' each' if layout.world_size > 1 else ''}")
    if layout.staged:
        parts.append(_count(layout.replicas, "replica") + f" of {layout.stage_count} stages")
    return ", ".join(parts)


def _boxes(job: TrainingJob | EvaluationJob, rank: int) -> str:
    layout = job.parallelism
    if isinstance(job, EvaluationJob) or job.script is not None:
        return "[script]" if isinstance(job, TrainingJob) else "[evaluation]"
    if layout.staged and layout.across_processes:
        replica, stage = divmod(rank, layout.stage_count)
        arrow = f" -> rank {rank + 1}" if stage + 1 < layout.stage_count else ""
        return f"[replica {replica}, {_stage(layout, stage)}]{arrow}"
    if layout.staged:
        return " -> ".join(f"[device {stage}: {_stage(layout, stage)}]" for stage in range(layout.stage_count))
    if layout.strategy is Strategy.DEVICES or layout.inside is Inside.DEVICES:
        count = layout.devices_per_rank
        return " ".join(f"[device {device}: replica {rank * count + device}]" for device in range(count))
    return f"[device 0: replica {rank}]"


def _stage(layout: Parallelism, stage: int) -> str:
    if not layout.cuts:
        return f"stage {stage}"
    return f"stage {stage} from {layout.cuts[stage - 1] if stage else 'the input'}"


def _beside(layout: Parallelism, host: int, hosts: int) -> list[str]:
    """Return what runs beside the ranks of a host: the scheduler on the first, servers on one after the other."""
    if layout.strategy is not Strategy.PARAMETER_SERVER:
        return []
    return [*(["scheduler"] if host == 0 else []), *(f"server {n}" for n in range(host, layout.servers, hosts))]


def _notes(job: TrainingJob, layout: Parallelism) -> list[tuple[str, str]]:
    batch = job.effective().batch_size
    share = batch // layout.replicas
    rows = [f"{batch} a step"]
    if layout.replicas > 1:
        rows.append(f"{share} a {'replica of the stages' if layout.staged else 'rank'}")
    if not layout.staged and layout.devices_per_rank > 1:
        rows.append(f"about {-(-share // layout.devices_per_rank)} a device")
    if layout.accumulate > 1:
        rows.append(f"in {layout.accumulate} parts, one after the other")
    if layout.micro_batches > 1:
        rows.append(f"in {layout.micro_batches} micro-batches, {_SCHEDULES[layout.schedule]}")
    notes = [("rows", ", ".join(rows))]
    if layout.staged and not layout.cuts:
        notes.append(("stages", f"cut so that each has as much {_cost(layout)} as the others"))
    if meeting := _meeting(layout):
        notes.append(("gradients", meeting))
    return notes


def _cost(layout: Parallelism) -> str:
    return {"parameters": "weight", "activations": "activation", "time": "time"}[layout.balance.value]


def _meeting(layout: Parallelism) -> str:
    """Return where gradients meet; "" for one replica."""
    if layout.strategy is Strategy.PARAMETER_SERVER:
        return f"to {_count(layout.servers, 'server')} ({layout.kvstore.value}){_as(layout)}"
    steps = []
    if not layout.staged and layout.devices_per_rank > 1:
        steps.append("summed on device 0 of each rank")
    if layout.replicas > 1:
        what = "over the ranks of each stage" if layout.across_processes else f"over {layout.world_size} ranks"
        steps.append(f"summed {what} by Horovod over {layout.controller.value}{_as(layout)}")
    return ", then ".join(steps)


def _as(layout: Parallelism) -> str:
    return "" if layout.compression is Compression.NONE else f", as {layout.compression.value}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
