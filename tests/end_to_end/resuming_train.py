"""The small transformer of :mod:`pipeline_train`, which keeps its states layer by layer and resumes under any split.

What the files of ``meshplan replan --out`` start in :mod:`test_resume_netns`. Every layer, the embedding and the head
are a file each of the store at ``TEST_STORE``: weights of 16 bits, then what Adam holds in 32 bits (master copy and
both moments), 14 bytes a parameter. Rank 0 appends to ``TEST_STEPS_FILE``, for every step that is done, how many ranks
there are, the step, the time, and when the program had begun.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

BEGAN_S = time.time()  # before torch is imported: starting counts from here

import torch  # noqa: E402 - see above
import torch.distributed as dist  # noqa: E402 - see above
from pipeline_train import Trainer  # noqa: E402 - see above
from torch import Tensor, nn  # noqa: E402 - see above

BYTES_PER_PARAMETER = 14
LATEST = "latest.json"


class Store:
    """The checkpoints of a run, behind a link."""

    def __init__(self, url: str) -> None:
        self.url = url

    def put(self, name: str, content: bytes) -> None:
        request = urllib.request.Request(f"{self.url}/{name}", content, method="PUT")  # noqa: S310 - the test's own
        urllib.request.urlopen(request).close()  # noqa: S310 - the test's own

    def get(self, name: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}/{name}") as answer:  # noqa: S310 - the test's own
            return bytes(answer.read())

    def latest(self) -> int:
        """The step that was kept last; 0 before the first."""
        try:
            return int(json.loads(self.get(LATEST))["step"])
        except urllib.error.HTTPError:
            return 0


def parts(trainer: Trainer, layers_per_chunk: list[int]) -> Iterator[tuple[str, nn.Module]]:
    """What a stage holds, by names that no split changes."""
    first = sum(layers_per_chunk[: trainer.stage])
    if trainer.model.embedding is not None:
        yield "embedding", trainer.model.embedding
    for number, layer in enumerate(trainer.model.layers):
        yield f"layer-{first + number}", layer
    if trainer.model.head is not None:
        yield "head", trainer.model.head


def states(trainer: Trainer, part: nn.Module) -> list[Tensor]:
    """Master copies and moments of a part's parameters."""
    found = []
    for parameter in part.parameters():
        kept = trainer.optimizer.state[parameter]
        if not kept:  # Adam makes its moments in its first step
            kept |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter)}
            kept |= {"exp_avg_sq": torch.zeros_like(parameter)}
        found += [parameter.data, kept["exp_avg"], kept["exp_avg_sq"]]
    return found


def save(store: Store, trainer: Trainer, layers_per_chunk: list[int], step: int) -> None:
    """Keep what this rank holds; training waits. Replicas hold the same, so the first of them does it."""
    if trainer.replica == 0:
        for name, part in parts(trainer, layers_per_chunk):
            whole = torch.cat([one.flatten() for one in states(trainer, part)])
            weights = torch.cat([one.data.flatten() for one in part.parameters()]).to(torch.bfloat16)
            content = weights.view(torch.uint8).numpy().tobytes() + whole.numpy().tobytes()
            assert len(content) == BYTES_PER_PARAMETER * weights.numel()
            store.put(f"{step}/{name}", content)
    dist.barrier()
    if dist.get_rank() == 0:
        store.put(LATEST, json.dumps({"step": step}).encode())
    dist.barrier()


def load(store: Store, trainer: Trainer, layers_per_chunk: list[int], step: int) -> None:
    """Take over what the split gives this rank."""
    for name, part in parts(trainer, layers_per_chunk):
        content = store.get(f"{step}/{name}")
        count = sum(one.numel() for one in part.parameters())
        assert len(content) == BYTES_PER_PARAMETER * count, (name, len(content))
        flat = torch.frombuffer(bytearray(content[2 * count :]), dtype=torch.float32)
        offset = 0
        for state in states(trainer, part):
            state.copy_(flat[offset : offset + state.numel()].view_as(state))
            offset += state.numel()
        for parameter in part.parameters():
            trainer.optimizer.state[parameter]["step"] = torch.tensor(float(step))


def main() -> None:
    """Train from the last step that was kept."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = json.loads(Path(os.environ["MESHPLAN_CONFIG"]).read_text())["config"]
    layers_per_chunk = config["layers_per_chunk"]
    trainer = Trainer(config, json.loads(os.environ["TEST_SHAPE"]))
    store, every = Store(os.environ["TEST_STORE"]), int(os.environ["TEST_SAVE_EVERY"])
    begin = [store.latest()]
    dist.broadcast_object_list(begin)
    if begin[0]:
        load(store, trainer, layers_per_chunk, begin[0])
    told = Path(os.environ["TEST_STEPS_FILE"])

    def tell(step: int) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            with told.open("a") as file:
                file.write(f"{dist.get_world_size()} {step} {time.time()} {BEGAN_S}\n")

    tell(begin[0])
    for step in range(begin[0] + 1, int(os.environ["TEST_LAST_STEP"]) + 1):
        trainer.step()
        tell(step)
        if step % every == 0:
            save(store, trainer, layers_per_chunk, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
