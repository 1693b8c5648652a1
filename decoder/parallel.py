"""Tensor-parallel targets under torchrun: transformers' own sharding, and ranks that follow what the first one times."""

from __future__ import annotations

import atexit
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from decoder.errors import TargetError, TreebudgetError, UsageError
from decoder.shape import model_shape

if TYPE_CHECKING:
    from decoder.backend import TransformersBackend

STOP = "stop"


def join_ranks(tensor_parallel: int, device: str) -> str:
    """Join the processes that torchrun started; returns the device of this one.

    Raises UsageError where there are not exactly `tensor_parallel` of them, with the command that starts them, and for a
    device that is not here.
    """
    found = int(os.environ.get("WORLD_SIZE", "1"))
    if found != tensor_parallel or (tensor_parallel > 1 and "RANK" not in os.environ):
        words = shlex.join(word for word in sys.argv[1:] if word != "profile") or f"--tp {tensor_parallel}"
        command = f"torchrun --no-python --nproc-per-node {max(tensor_parallel, found)} costmodel profile {words}"
        raise UsageError(f"--tp {tensor_parallel} needs {tensor_parallel} processes under torchrun, this is 1 of {found}",
                         hint=f"start it so: {command}" if tensor_parallel > 1 else f"add --tp {found}, or run without torchrun")
    if tensor_parallel == 1:
        return device
    if device == "cpu" and torch.cuda.is_available():
        raise UsageError("transformers shards over the GPUs where there are some", hint="add --device cuda, or hide the GPUs: "
                         "CUDA_VISIBLE_DEVICES= torchrun ...")
    import torch.distributed as dist

    from decoder.target import check_device

    check_device(device)
    if device.startswith("cuda"):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
        atexit.register(_leave_ranks)
    return device


def _leave_ranks() -> None:
    """Stop the group's threads before the interpreter ends: one that still runs then aborts the process now and then."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def rank_of(tensor_parallel: int) -> int:
    """This process's rank among the ranks of a target; 0 where it is the only one."""
    if tensor_parallel == 1:
        return 0
    import torch.distributed as dist

    return int(dist.get_rank())


def check_linear(linear: str) -> str:
    """Sharded layers are computed as transformers made them; UsageError for another form."""
    if linear not in ("auto", "default"):
        raise UsageError(f"linear layers cannot be {linear} under tensor parallelism: allowed are auto and default")
    return "default"


def check_shares(config: Any, tensor_parallel: int) -> None:
    """Every rank needs whole heads: TargetError where the number of ranks does not divide them."""
    shape = model_shape(config)
    uneven = [f"{shape[name]} {what}" for name, what in (("heads", "heads"), ("kv_heads", "key/value heads"))
              if shape[name] % tensor_parallel]
    if uneven:
        raise TargetError(f"{' and '.join(uneven)} cannot be shared by {tensor_parallel} ranks",
                          hint="use a number of ranks that divides them")


def sharding_options(tensor_parallel: int) -> dict[str, Any]:
    """What `from_pretrained` is told so that it shards by the model's own plan, in the words of this transformers release."""
    try:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=tensor_parallel, tp_plan="auto")}
    except (ImportError, TypeError):  # before 5.0
        return {"tp_plan": "auto"}


def random_shards(config: Any, dtype: torch.dtype, tensor_parallel: int) -> Any:
    """A sharded model of that configuration: no rank ever holds more than its share. Weights are drawn where they lie.

    It is loaded from a checkpoint without a single tensor, so that transformers initialises them all itself.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from decoder.target import dtype_argument, quiet_loading

    check_shares(config, tensor_parallel)
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    shown = logging.get_verbosity()
    logging.set_verbosity_error()  # every tensor is missing, on purpose
    try:
        with quiet_loading(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # random numbers on a CPU mesh, which is for tests
            options = {**dtype_argument(dtype), **sharding_options(tensor_parallel)}
            return kind.from_pretrained(None, config=config, state_dict={}, **options)
    except (OSError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise TargetError(f"transformers cannot shard {config.model_type} over {tensor_parallel} ranks: {reason}",
                          hint="use a number that divides its heads and widths") from error
    finally:
        logging.set_verbosity(shown)


class FirstRank:
    """The backend of rank 0: it decides what is run, tells the other ranks, and times with all of them.

    What is asked for is broadcast before the clock starts (`make_ready`), behind a barrier that every rank reaches idle; so
    the timed call itself holds nothing but the work. Implements `costmodel.backend.Backend`.
    """

    def __init__(self, backend: TransformersBackend) -> None:
        self.backend = backend
        self.identity = backend.identity
        self._announced: tuple[str, int] | None = None

    def __getattr__(self, name: str) -> Any:
        """The optional attributes of a backend, as the local one has them."""
        if name == "backend":
            raise AttributeError(name)
        return getattr(self.backend, name)

    def prepare(self, context_tokens: int, num_requests: int = 1) -> None:
        """Make the cache, on every rank."""
        _tell(("prepare", context_tokens, num_requests))
        self.backend.prepare(context_tokens, num_requests)

    def make_ready(self, stage: str, size: int) -> None:
        """Announce what comes next; returns when every rank is ready for it."""
        _tell((stage, size))
        _ready(self.backend, stage, size)
        self._announced = (stage, size)

    def _run(self, stage: str, size: int) -> int:
        if self._announced != (stage, size):
            self.make_ready(stage, size)
        self._announced = None
        return run_stage(self.backend, stage, size)

    def verify(self, num_verify_tokens: int) -> int:
        """One target forward, every rank its share."""
        return self._run("verify", num_verify_tokens)

    def draft(self, block_size: int = 0) -> int:
        """One drafter pass, on every rank alike."""
        return self._run("draft", block_size)

    def select(self, num_nodes: int) -> int:
        """From logits to a tree, on every rank alike."""
        return self._run("select", num_nodes)

    def commit(self, num_tokens: int) -> int:
        """Commit and undo, every rank its own heads."""
        return self._run("commit", num_tokens)

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        self.backend.synchronize()

    def close(self) -> None:
        """Let the other ranks go; raises TargetError where one has run another number of forwards than this one."""
        import torch.distributed as dist

        _tell((STOP,))
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, self.backend.num_target_forwards)
        if len(set(counts)) > 1:
            raise TargetError(f"the ranks ran different numbers of target forwards: {counts}")


def follow(backend: TransformersBackend) -> None:
    """What every rank but the first does: run what rank 0 announces until it says stop."""
    import torch.distributed as dist

    while True:
        command = _told()
        if command[0] == STOP:
            dist.all_gather_object([None] * dist.get_world_size(), backend.num_target_forwards)
            return
        try:
            if command[0] == "prepare":
                backend.prepare(*command[1:])
            else:
                _ready(backend, *command)
                run_stage(backend, *command)
                backend.synchronize()
        except TreebudgetError:  # rank 0 meets the same and decides what follows
            continue


def run_stage(backend: TransformersBackend, stage: str, size: int) -> int:
    """One call of one stage; a draft of size 0 has the drafter's own block size."""
    calls: dict[str, Callable[[int], int]] = {"verify": backend.verify, "draft": backend.draft, "select": backend.select,
                                              "commit": backend.commit}
    return int(calls[stage](size))


def _ready(backend: TransformersBackend, stage: str, size: int) -> None:
    import torch.distributed as dist

    try:
        backend.make_ready(stage, size)
    finally:
        backend.synchronize()
        dist.barrier()


def _tell(command: tuple[Any, ...]) -> None:
    import torch.distributed as dist

    dist.broadcast_object_list([command], src=0, device=torch.device("cpu"))


def _told() -> tuple[Any, ...]:
    import torch.distributed as dist

    box: list[Any] = [None]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return tuple(box[0])
