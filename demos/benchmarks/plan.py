"""What a large build takes on several machines: hours, bytes and what breaks first, from measured rates.

    python demos/benchmarks/plan.py [--images 1280000] [--units 1152] [--machines 8 16 32 64] [--cores 32] [--gpu]

Every rate below says where it comes from: *measured* on two cores without a GPU (tables of demos/guides/scaling.md;
clustering 400,000 instances by paper_scale_unit.py), or *estimated* from operations. A stage takes whole rounds of its
pieces on all machines, and the parts that one process does alone are added. The plan is arithmetic; nothing of this
size was run.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

TILE_OPERATIONS = 0.64e12  # of the tower up to the target layer, for one tile; counted
GPU_RATE = 125e12  # operations a second of an A100 in bfloat16, 40 % of its peak; estimated
CPU_TILE_SECONDS = 11.0  # the tower for one tile on two cores; measured
STORE_READ = 2e9  # bytes a second from a local disk; assumed
NETWORK = 1.25e9  # bytes a second of a machine's network, 10 Gbit/s; assumed
STORE_PUT = 0.05  # seconds until an object store answers; assumed
PREPARE_SECONDS = 0.03  # of one core to decode a JPEG of 500 x 375 and cut it into three tiles; measured
TASKS_A_GPU = 8  # --resource gpus=0.125: so many tasks prepare images for one GPU
PRODUCTS = 5e10  # operations a second of one core in products; estimated
SORTED = 1e7  # numbers a second that one core sorts; measured
CLUSTER_SECONDS = {10_000: 3.9, 100_000: 15.3, 400_000: 85.0}  # a unit, one core; measured
CLUSTER_BYTES = {10_000: 1.3e9, 100_000: 4.8e9, 400_000: 2.1e9}  # for one unit at a time; measured
SCORER_OPERATIONS = 0.67e12  # of the dual encoder for one image; counted
CALIBRATION_PIECES = 16  # sums in a fixed order: no more machines help
SHARD_IMAGES = 64


@dataclass(frozen=True)
class Job:
    """What is built, and on what.

    Attributes:
        images: probing images.
        units: of the layer.
        inputs: of the layer.
        tiles: of an image.
        patches: of a tile.
        tokens: stored for each image.
        top_k: instances of a unit.
        parts: sub-units of a unit.
        labelled: images from which labels are found.
        machines: that do pieces.
        cores: of a machine.
        memory: bytes of a machine.
        gpu: whether each machine has one.
    """

    images: int = 1_280_000
    units: int = 1152
    inputs: int = 4304
    tiles: int = 3
    patches: int = 729
    tokens: int = 2
    top_k: int = 400_000
    parts: int = 8
    labelled: int = 50_000
    machines: int = 8
    cores: int = 32
    memory: float = 128e9
    gpu: bool = True

    @property
    def store(self) -> float:
        """Bytes of the token store."""
        return self.images * self.tokens * (self.inputs * 2 + 8)

    def seconds_of(self, operations: float) -> float:
        """Seconds of one machine for so many operations of a model."""
        return operations / (GPU_RATE if self.gpu else TILE_OPERATIONS / CPU_TILE_SECONDS * self.cores / 2)

    @property
    def image_seconds(self) -> float:
        """Seconds of one machine for the tower on one image."""
        prepare = PREPARE_SECONDS / (min(self.cores, TASKS_A_GPU) if self.gpu else self.cores)
        return max(prepare, self.tiles * self.seconds_of(TILE_OPERATIONS))

    @property
    def clusters_at_a_time(self) -> int:
        """Units that one machine clusters at a time."""
        return max(1, min(self.cores, int(self.memory / CLUSTER_BYTES[self.nearest_size])))

    @property
    def nearest_size(self) -> int:
        """The size for which there is a rate: the smallest that is not below `top_k`."""
        return min((size for size in CLUSTER_SECONDS if size >= self.top_k), default=max(CLUSTER_SECONDS))


@dataclass(frozen=True)
class Stage:
    """One stage: seconds on all machines, the longest piece, seconds of the first process alone, and pieces."""

    name: str
    parallel: float
    piece: float
    alone: float
    pieces: int
    limit: str


def plan(job: Job) -> list[Stage]:
    """The stages of a build with what each takes."""
    shards, blocks = math.ceil(job.images / SHARD_IMAGES), math.ceil(job.units / 32)
    image = job.image_seconds
    sub_units = job.units * (job.parts + 1)
    fetch = job.store / NETWORK
    block = pass_over_store(job, 32, job.top_k)
    cluster = CLUSTER_SECONDS[job.nearest_size]
    bound = "memory of a machine" if job.clusters_at_a_time < job.cores else "cores"
    split = pass_over_store(job, 32 * (job.parts + 1), 100)
    pooled = job.labelled * sub_units * 8
    joined = pooled / NETWORK + pooled / STORE_READ
    scorer = job.seconds_of(SCORER_OPERATIONS)
    label_shards = math.ceil(job.labelled / SHARD_IMAGES)
    calibrated = min(job.labelled, 10_000)
    return [
        spread(job, "collecting", shards, SHARD_IMAGES * image, 1, shards * STORE_PUT / 8 + 2 * fetch, "the towers"),
        spread(job, "ranking", blocks, block, job.cores, 0, f"{blocks} blocks; each machine fetches the store"),
        spread(job, "clustering", job.units, cluster, job.clusters_at_a_time, 0, bound),
        spread(job, "splitting", blocks, split, job.cores, 0, f"{blocks} blocks"),
        spread(job, "pooling", label_shards, SHARD_IMAGES * image, 1, joined, "the first process"),
        spread(job, "scoring", label_shards, SHARD_IMAGES * scorer, 1, 0, "GPUs"),
        spread(job, "calibrating", CALIBRATION_PIECES, calibrated / CALIBRATION_PIECES * image, 1, 0, "16 pieces"),
    ]  # fmt: skip


def pass_over_store(job: Job, vectors: int, kept: int) -> float:
    """Seconds of one core to find the strongest instances of so many units or sub-units: products, sorts, reading."""
    rows, step = job.images * job.tokens, max(8192, kept)
    ordered = vectors * math.ceil(rows / step) * (step + kept)
    return 2 * vectors * rows * job.inputs / PRODUCTS + ordered / SORTED + job.store / STORE_READ


def spread(job: Job, name: str, pieces: int, seconds: float, slots: int, alone: float, limit: str) -> Stage:
    """A stage of equal pieces: whole rounds of as many as run at a time on all machines."""
    rounds = math.ceil(pieces / (slots * job.machines))
    return Stage(name, rounds * seconds, seconds, alone, pieces, limit)


def first_to_break(job: Job) -> list[str]:
    """What does not fit, and what no longer gets faster, worst first."""
    found = []
    need = CLUSTER_BYTES[job.nearest_size]
    if job.gpu:
        busy = job.tiles * job.seconds_of(TILE_OPERATIONS)
        idle_share = PREPARE_SECONDS / (busy + PREPARE_SECONDS)
        found.append(
            f"one task a GPU prepares its images itself and leaves it idle {idle_share:.0%} of the time "
            f"(ask for gpus={1 / TASKS_A_GPU:g})"
        )
    if need > job.memory:
        found.append(f"one unit needs {need / 1e9:.1f} GB to cluster, a machine has {job.memory / 1e9:.0f}")
    elif job.clusters_at_a_time < job.cores:
        found.append(
            f"memory holds {job.clusters_at_a_time} units at a time for {job.cores} cores ({need / 1e9:.1f} GB each)"
        )
    found.append(
        f"each machine fetches the {job.store / 1e9:.0f} GB of tokens in {job.store / NETWORK:.0f} s, "
        f"{job.machines * job.store / 1e12:.1f} TB in all"
    )
    stages = plan(job)
    slowest = max(stages, key=lambda stage: stage.alone)
    alone = sum(stage.alone for stage in stages)
    found.append(f"the first process works {alone:.0f} s alone, most of it after {slowest.name}")
    idle = [stage.name for stage in stages if stage.pieces < job.machines]
    if idle:
        found.append(f"fewer pieces than machines in {', '.join(idle)}")
    return found


def print_plan(images: int, units: int, machines: Sequence[int], cores: int, top_k: int, gpu: bool) -> None:
    """Print hours by stage and number of machines, and what breaks first."""
    jobs = [Job(images=images, units=units, machines=n, cores=cores, top_k=top_k, gpu=gpu) for n in machines]
    plans = [plan(job) for job in jobs]
    print(
        f"| hours on machines of {cores} cores{', one GPU' if gpu else ''} | {' | '.join(map(str, machines))} | limit |"
    )
    print("|" + "---|" * (len(machines) + 2))
    for rows in zip(*plans, strict=True):
        cells = " | ".join(f"{(row.parallel + row.alone) / 3600:.2f}" for row in rows)
        print(f"| {rows[0].name}, {rows[0].pieces:,} pieces | {cells} | {rows[0].limit} |")
    totals = [sum(row.parallel + row.alone for row in rows) / 3600 for rows in plans]
    print(f"| all | {' | '.join(f'{total:.1f}' for total in totals)} | |")
    print()
    for job in (jobs[0], jobs[-1]):
        print(f"With {job.machines}: {'; '.join(first_to_break(job))}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1_280_000)
    parser.add_argument("--units", type=int, default=1152)
    parser.add_argument("--machines", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--cores", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=400_000)
    parser.add_argument("--gpu", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    print_plan(options.images, options.units, options.machines, options.cores, options.top_k, options.gpu)


if __name__ == "__main__":
    main()
