"""The schedule of one component's phase, as discrete events: fetch, link, disk, compute, release, layer by layer.

Three resources work at once where the machine lets them: the disk reads one layer at a time, the link copies one at a
time, and the device computes. A layer's fetch is issued when its place in the prefetch window is reached and a slot is
free, that is, when the layer that was in it has computed. Without overlap a fetch is issued when the device asks for
the layer, and the device waits. The planner, the tests and the report use this one model.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_EXACT_PASSES = 4
"""Passes that are simulated event by event; from then on each takes as long as the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One unit's turn in a pass.

    Attributes:
        compute_s: seconds on the device.
        link_s: seconds of copying to the device; zero for a unit that is there.
        disk_s: seconds of reading from the disk in every pass.
        first_disk_s: seconds of reading in the first pass, when nothing is cached yet.
        streamed: whether it passes through a slot.
    """

    compute_s: float
    link_s: float = 0.0
    disk_s: float = 0.0
    first_disk_s: float = 0.0
    streamed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One unit's turn as it happened: when it was asked for, fetched, computed; in seconds from the phase's begin."""

    step: int
    issued_s: float
    ready_s: float
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What the simulation found. `stall_s` is the time in which the device waited for weights."""

    seconds: float
    stall_s: float
    events: tuple[Event, ...]


def simulate(
    steps: Sequence[Step],
    *,
    passes: int,
    slots: int,
    prefetch_layers: int,
    overlap: bool,
    loss: float = 0.0,
    begin_s: float = 0.0,
) -> Schedule:
    """Run the steps `passes` times.

    Args:
        steps: the units in their order of use.
        passes: forwards in one request.
        slots: buffers that streamed units take turns in; at least one where any is streamed.
        prefetch_layers: streamed units that are fetched ahead of the one in use.
        overlap: whether disk and link work beside the compute.
        loss: which part of their time the compute then loses to them.
        begin_s: seconds of fetching what is held for the phase, before the first step.
    """
    ahead = prefetch_layers if overlap else 0
    state = _State(ahead=ahead, overlap=overlap, loss=loss, now=begin_s, disk_free=begin_s, link_free=begin_s)
    state.ends.extend([0.0] * slots)
    state.starts.extend([0.0] * ahead)
    exact = min(passes, _EXACT_PASSES)
    events: list[Event] = []
    ends: list[tuple[float, float]] = []
    for number in range(exact):
        for index, step in enumerate(steps):
            disk_s = step.first_disk_s if number == 0 else step.disk_s
            events.append(state.take(index, step, disk_s))
        ends.append((state.now, state.stall_s))
    seconds, stall_s = ends[-1]
    if passes > exact:
        before = ends[-2]
        seconds += (passes - exact) * (ends[-1][0] - before[0])
        stall_s += (passes - exact) * (ends[-1][1] - before[1])
    return Schedule(seconds=seconds, stall_s=stall_s + begin_s, events=tuple(events))


@dataclass(slots=True, kw_only=True)
class _State:
    """The clock of each resource. `ends` (one a slot) and `starts` (one a layer ahead) are the last streamed units'."""

    ahead: int
    overlap: bool
    loss: float
    now: float
    disk_free: float
    link_free: float
    stall_s: float = 0.0
    ends: deque[float] = field(default_factory=deque[float])
    starts: deque[float] = field(default_factory=deque[float])

    def take(self, index: int, step: Step, disk_s: float) -> Event:
        asked = self.now
        issued = ready = asked
        if step.streamed or disk_s or step.link_s:
            # The slot of the unit before the last ones is free when that unit has computed.
            issued = max(self.ends[0], self.starts[0]) if self.ahead and step.streamed else asked
            ready = self._fetch(issued, disk_s, step.link_s)
        started = max(asked, ready)
        ended = started + step.compute_s
        if step.streamed and self.overlap:
            ended += self.loss * (disk_s + step.link_s)
        self.stall_s += started - asked
        self.now = ended
        if step.streamed:
            for clock, moment in ((self.ends, ended), (self.starts, started)):
                clock.append(moment)
                clock.popleft()
        return Event(step=index, issued_s=issued, ready_s=ready, started_s=started, ended_s=ended)

    def _fetch(self, issued: float, disk_s: float, link_s: float) -> float:
        """A layer's disk read and link copy: chunk by chunk beside each other, or one after the other."""
        disk_begin = max(issued, self.disk_free)
        self.disk_free = disk_begin + disk_s
        link_begin = max(issued, self.link_free)
        if self.overlap:
            self.link_free = max(self.disk_free, link_begin + link_s)
        else:
            self.link_free = max(self.disk_free, link_begin) + link_s
        return self.link_free
