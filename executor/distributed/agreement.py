"""What the ranks of a group tell one another. No rank waits for one that has failed: a failure is told too."""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

from torch import distributed as dist

from ...plans.codec import plan_from_json, plan_to_json
from ...plans.document import Plan
from ...plans.errors import ExecutionError

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    why: str


def rank_and_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """This process's number in a group, and how many there are; null is the group of all.

    Raises:
        ExecutionError: torch.distributed is not set up here, or this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ExecutionError(
            "this process is no rank: torch.distributed is not set up",
            hint="start it with torchrun, and call torch.distributed.init_process_group first",
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ExecutionError(f"rank {dist.get_rank()} is not in the group", hint="call it from the group's ranks only")
    return rank, dist.get_world_size(group)


def agree(make: Callable[[], _T], group: dist.ProcessGroup | None = None) -> list[_T]:
    """What `make` gives at each rank, at every rank, in order of ranks. All ranks call it.

    Raises:
        ExecutionError: it failed at other ranks, which are named; where it failed, the error itself goes on.
    """
    _, size = rank_and_size(group)
    try:
        own = make()
    except Exception as error:
        _gather(_Failure(why=f"{type(error).__name__}: {error}"), size, group)
        raise
    told = _gather(own, size, group)
    failed = [f"rank {rank}: {each.why}" for rank, each in enumerate(told) if isinstance(each, _Failure)]
    if failed:
        raise ExecutionError(f"failed at other ranks: {'; '.join(failed)}")
    return cast("list[_T]", told)


def share(make: Callable[[], Plan], group: dist.ProcessGroup | None = None) -> Plan:
    """The plan that rank 0 makes, at every rank; each reads the document and checks its digest.

    Raises:
        ExecutionError: as `agree`.
        PlanFormatError: what arrived does not match its digest, or this rank's version does not read it.
    """
    rank, _ = rank_and_size(group)
    document = agree(lambda: plan_to_json(make()) if rank == 0 else "", group)[0]
    return plan_from_json(document, source="the plan of rank 0")


def _gather(own: object, size: int, group: dist.ProcessGroup | None) -> list[object]:
    told: list[object] = [None] * size
    dist.all_gather_object(told, own, group)
    return told
