"""What follows from several flags of a training command: replicas, shards, micro-batches; contradictions are named."""

from __future__ import annotations

from meshplan.planner.imports.reading import Reading

_MODEL_DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel")


def complete_training(reading: Reading, num_devices: int | None) -> None:
    """Fill in the terms that the others decide.

    devices = tensor × pipeline × context × data; global batch = micro-batch × micro-batches × data.

    Args:
        reading: of one source, its own defaults filled in.
        num_devices: processes of the job; None where it is not stated.
    """
    if reading.problems:
        return  # a degree may be missing
    _replicas(reading, num_devices)
    if "data_parallel" not in reading.values:
        return
    _shards(reading)
    _batch(reading)


def _replicas(reading: Reading, num_devices: int | None) -> None:
    values = reading.values
    degrees = 1
    for name in _MODEL_DEGREES:
        degrees *= values[name]
    product = " × ".join(f"{name} {values[name]}" for name in _MODEL_DEGREES)
    if num_devices is None:
        if "data_parallel" not in values:
            reading.report(
                "cluster", "the command does not state how many processes it starts: give --nodes (and --node-type)"
            )
        return
    if num_devices % degrees:
        reading.report("fixed", f"{product} = {degrees} does not divide the {num_devices} processes that are started")
        return
    replicas = num_devices // degrees
    stated = values.get("data_parallel")
    if stated is not None and stated != replicas:
        reading.report(
            "fixed", f"{product} × data_parallel {stated} are {degrees * stated} devices, {num_devices} are started"
        )
        return
    reading.assume("data_parallel", replicas, f"{num_devices} processes / {degrees}")


def _shards(reading: Reading) -> None:
    values = reading.values
    replicas, groups = values["data_parallel"], values.pop("num_shard_groups", 1)
    if replicas * values["context_parallel"] == 1 and "zero_stage" not in reading.source_flags and values["zero_stage"]:
        reading.assumed = [one for one in reading.assumed if one.term != "zero_stage"]
        del values["zero_stage"]
        reading.assume("zero_stage", 0, "one device has nothing to shard with")
    if values["zero_stage"] == 0:
        values["data_parallel_shard"] = 1
    elif replicas % groups:
        reading.report("fixed.data_parallel_shard", f"{groups} groups of shards do not divide {replicas} replicas")
    else:
        values.setdefault("data_parallel_shard", replicas // groups)


def _batch(reading: Reading) -> None:
    """Any two of micro-batch, number of micro-batches and global batch give the third."""
    values = reading.values
    replicas = values["data_parallel"]
    micro, number, total = (values.get(name) for name in ("micro_batch_size", "num_microbatches", "global_batch_size"))
    if total is None and micro is not None:
        # One forward pass a step is what every framework does where nothing asks for more.
        number = reading.assume("num_microbatches", 1, "no accumulation is stated")
        reading.assume("global_batch_size", micro * number * replicas, "micro-batch × micro-batches × replicas")
        return
    if total is None:
        return
    if micro is None:
        passes = replicas * (number or 1)
        if total % passes:
            reading.report(
                "workload.global_batch_size", f"{total} sequences do not divide into {passes} forward passes"
            )
            return
        micro = reading.assume("micro_batch_size", total // passes, f"{total} sequences / {passes} forward passes")
    if number is None:
        if total % (micro * replicas):
            message = f"{total} is no multiple of micro_batch_size {micro} × data_parallel {replicas}"
            reading.report("workload.global_batch_size", message)
            return
        reading.assume("num_microbatches", total // (micro * replicas), "global batch / (micro-batch × replicas)")
    elif micro * number * replicas != total:
        message = f"{micro} × {number} micro-batches × {replicas} replicas are {micro * number * replicas}, not {total}"
        reading.report("workload.global_batch_size", message)
