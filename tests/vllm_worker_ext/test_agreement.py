"""All ranks get the same answer, whatever dies, hangs or comes late."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import pytest
from agreeing import UNKNOWN, Fault, Schedule, decide, rank_process, share
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import wait_for
from sparrowrl.errors import ConfigError, DeadlineExceeded, StateError, TransportError, UnknownState
from sparrowrl.vllm_worker_ext.agreement import Agreement

T = TypeVar("T")
LONG = 60.0
SHM = Path("/dev/shm")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as name:
        yield Path(name)


def agreements(folder: Path, world: int, deadline: float = LONG) -> list[Agreement]:
    return [Agreement(folder / "agreement", rank, world, deadline) for rank in range(world)]


def together(ranks: list[Agreement], act: Callable[[Agreement, int], T]) -> list[T]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(act, ranks, range(len(ranks))))


def check(answers: list[str | None], problems: list[str | None]) -> None:
    """`answers` of those that answered, `problems` of all: one answer for all, commit only if all were ready."""
    known = [answer for answer in answers if answer != UNKNOWN]
    assert len({answer is None for answer in known}) <= 1, answers
    if None in known:
        assert problems == [None] * len(problems)


# What it says.


def test_a_world_of_one_touches_no_file(folder):
    alone = Agreement(folder / "missing" / "agreement", 0, 1, 0.0)
    assert alone.share("es", b"data", "e") == [b"data"]
    assert alone.decide("e", None) is None
    assert alone.decide("f", "bad") == "rank 0: bad"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("world", [2, 3, 4])
def test_everyone_gets_everything_in_rank_order(folder, world):
    data = [bytes([rank]) * size for rank, size in zip(range(world), (3, 0, 5_000_000, 1), strict=False)]
    ranks = agreements(folder, world)
    assert together(ranks, lambda own, rank: own.share("es", data[rank], "e")) == [data] * world
    assert together(ranks, lambda own, rank: own.decide("e", None)) == [None] * world


def test_a_share_names_those_who_did_not_come(folder):
    ranks = agreements(folder, 4, 0.05)
    assert isinstance(share(ranks[2], "es", b""), DeadlineExceeded)
    with pytest.raises(
        DeadlineExceeded, match=r"sharing es: expected data of 4 ranks; rank 1, 3 did not come within 0.05 s;"
    ):
        ranks[0].share("es", b"", "e")


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_problem_is_everyones_at_once(folder, bad):
    ranks = agreements(folder, 3)
    problems = ["no" if rank == bad else None for rank in range(3)]
    assert together(ranks, lambda own, rank: own.decide("e", problems[rank])) == [f"rank {bad}: no"] * 3


def test_the_first_problem_is_the_answer(folder):
    ranks = agreements(folder, 3)
    assert ranks[2].decide("e", "first \ud800\n") == "rank 2: first \\ud800\n"
    assert ranks[0].decide("e", "second") == "rank 2: first \\ud800\n"
    assert ranks[1].decide("e", None) == "rank 2: first \\ud800\n"


def test_an_empty_problem_is_a_problem(folder):
    ranks = agreements(folder, 2)
    assert ranks[1].decide("e", "") == ranks[0].decide("e", None) == "rank 1: "


def test_the_deadline_names_the_missing_and_holds_for_them_too(folder):
    ranks = agreements(folder, 4, 0.2)
    began = time.monotonic()
    answers = together(ranks[:2], lambda own, rank: own.decide("e", None))
    assert 0.2 <= time.monotonic() - began < 5
    assert answers == ["rank 2, 3 did not come within 0.2 s; look at its log, or raise SPARROWRL_RANK_TIMEOUT"] * 2
    assert ranks[3].decide("e", None) == ranks[2].decide("e", "late") == answers[0]


def test_events_may_be_left_out_and_share_a_prefix(folder):
    ranks = agreements(folder, 2)
    assert together(ranks, lambda own, rank: own.share("1", b"", "1")) == [[b"", b""]] * 2
    assert ranks[1].decide("1.0", "only here") == "rank 1: only here"
    assert together(ranks, lambda own, rank: own.decide("1.0.1", None)) == [None, None]


@pytest.mark.parametrize("bad", [0, 2])
def test_a_share_ends_when_its_event_has_failed(folder, bad):
    """Those who wait for data need not wait for the deadline when a rank will never share any."""
    ranks = agreements(folder, 3)
    waiting = [own for rank, own in enumerate(ranks) if rank != bad]
    with ThreadPoolExecutor(2) as pool:
        shares = [pool.submit(own.share, "es", b"", "e") for own in waiting]
        wait_for(lambda: len(os.listdir(folder / "agreement")) == 2, 30, "two shares")
        assert ranks[bad].decide("e", "no") == f"rank {bad}: no"
        for pending in shares:
            with pytest.raises(StateError, match=f"sharing es: expected all ranks to succeed, but rank {bad}: no"):
                pending.result(30)
    assert [own.decide("e", "no data") for own in waiting] == [f"rank {bad}: no"] * 2


def test_offers_wait_for_nobody(folder):
    ranks = agreements(folder, 3)
    ranks[1].offer("e", b"one")
    ranks[2].offer("e", b"")
    assert [own.offered("e") for own in ranks] == [None] * 3
    ranks[0].offer("e", b"\0" * 3_000_000)
    assert [own.offered("e") for own in ranks] == [[b"\0" * 3_000_000, b"one", b""]] * 3
    ranks[1].offer("e", b"again")
    assert [own.offered("e") for own in ranks] == [[b"\0" * 3_000_000, b"again", b""]] * 3


def test_a_world_of_one_has_what_it_offered(folder):
    alone = Agreement(folder / "missing" / "agreement", 0, 1, 0.0)
    assert alone.offered("e") is None
    alone.offer("e", b"data")
    assert alone.offered("e") == [b"data"]


def test_a_rank_keeps_its_last_two_offers(folder):
    ranks = agreements(folder, 2)
    for number in range(100):
        for own in ranks:
            own.offer(f"{number}", b"")
            own.offer(f"{number}", b"x")
        assert ranks[0].offered(f"{number}") == [b"x", b"x"]
    assert sorted(os.listdir(folder / "agreement")) == ["98.0.data", "98.1.data", "99.0.data", "99.1.data"]
    assert ranks[0].offered("97") is None


# What it does when the folder fails.


def test_a_folder_that_cannot_be_made_is_a_wrong_setting(folder):
    with pytest.raises(ConfigError, match="missing"):
        Agreement(folder / "missing" / "agreement", 0, 2, LONG)


def test_a_folder_gone_before_is_an_abort(folder):
    """Without its vote nobody commits, so it need not ask."""
    own = agreements(folder, 2)[0]
    shutil.rmtree(folder / "agreement")
    with pytest.raises(TransportError, match=r"sharing es \(4 bytes\) through .*No such file"):
        own.share("es", b"data", "e")
    for refused in (lambda: own.offer("e", b""), lambda: own.offered("e")):
        with pytest.raises(OSError, match="No such file"):
            refused()
    assert own.decide("e", "bad") == "rank 0: bad"
    answer = own.decide("e", None)
    assert answer is not None and answer.startswith("rank 0: cannot vote in ")


def test_a_folder_removed_while_ranks_wait_is_an_unknown_state(folder):
    ranks = agreements(folder, 3)
    with ThreadPoolExecutor(2) as pool:
        deciding = pool.submit(ranks[1].decide, "e", None)
        sharing = pool.submit(ranks[2].share, "es", b"", "e")
        wait_for(lambda: len(os.listdir(folder / "agreement")) == 2, 30, "a vote and a share")
        (folder / "agreement").rename(folder / "gone")
        with pytest.raises(UnknownState, match="restore an anchor on all ranks"):
            deciding.result(30)
        with pytest.raises(TransportError, match="No such file"):
            sharing.result(30)


# What it leaves.


def test_files_go_when_all_ranks_have_come_further(folder):
    ranks = agreements(folder, 3)
    for number in range(5):
        together(ranks, lambda own, rank: own.share(f"{number}s", b"x", f"{number}d"))  # noqa: B023 - called at once
        assert sorted(os.listdir(folder / "agreement")) == [f"{number}s.{rank}.data" for rank in range(3)]
        together(ranks, lambda own, rank: own.decide(f"{number}d", None))  # noqa: B023
        assert os.listdir(folder / "agreement") == [f"{number}d.decision"]


def test_ten_thousand_events_leave_few_files(folder):
    """Ranks run freely, often several events apart, and a fifth of the events fail."""
    rng = random.Random(7)
    problems = {f"e{number}": [None, None] for number in range(10_000)}
    for number in rng.sample(range(10_000), 2000):
        problems[f"e{number}"][rng.randrange(2)] = "bad"
    ranks = agreements(folder, 2)
    most = 0

    def act(own: Agreement, rank: int) -> list[str | None]:
        nonlocal most
        answers = []
        for event, mine in problems.items():
            answers.append(own.decide(event, mine[rank]))
            most = max(most, len(os.listdir(folder / "agreement")))
        return answers

    answers = together(ranks, act)
    for event, *got in zip(problems, *answers, strict=True):
        bad = [rank for rank in range(2) if problems[event][rank]]
        assert got == ([f"rank {bad[0]}: bad"] * 2 if bad else [None, None])
    assert most <= 64 + 1 + 2 + 2  # aborts, a commit, votes, drafts


def test_events_that_all_fail_leave_few_files(folder):
    ranks = agreements(folder, 3, 0.0)
    for number in range(1000):
        for own in ranks[number % 3 :]:
            assert decide(own, f"{number}d", "bad") is not None
            assert isinstance(share(own, f"{number}s", b"x"), DeadlineExceeded | list)
    assert len(os.listdir(folder / "agreement")) <= 64 + 2 * 3


# Every order of steps: threads that take one step at a time, on a clock of their own.


@dataclass
class Trial:
    """Ranks of which each goes through `events`; `problems[event][rank]` says how it comes to them."""

    folder: Path
    problems: dict[str, list[str | None]]
    world: int
    kills: dict[int, int]
    failures: dict[int, set[int]]

    def run(self, steer: Callable[[Schedule], None]) -> None:
        """Run under the order of steps that `steer` gives, then to the end; check answers and what is left."""
        ranks = agreements(self.folder, self.world, 0.002)
        answers: dict[str, dict[int, str | None]] = {event: {} for event in self.problems}

        def go(rank: int) -> None:
            for event, problems in self.problems.items():
                answers[event][rank] = decide(ranks[rank], event, problems[rank])

        with pytest.MonkeyPatch.context() as patch:
            schedule = Schedule(patch)
            schedule.kills, schedule.failures = self.kills, self.failures
            schedule.start({rank: lambda rank=rank: go(rank) for rank in range(self.world)})
            steer(schedule)
            schedule.finish()
            for event, problems in self.problems.items():
                check(list(answers[event].values()), problems)
                assert len(answers[event]) == self.world or self.kills
            if self.kills or self.failures:
                return
            shares: list[Any] = []
            schedule.start({r: lambda r=r: shares.append(share(ranks[r], "end", b"")) for r in range(self.world)})
            schedule.finish()
        assert shares == [[b""] * self.world] * self.world
        assert sorted(os.listdir(self.folder / "agreement")) == [f"end.{rank}.data" for rank in range(self.world)]


def in_new_folder(run: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as name:
        run(Path(name))


def all_ready(world: int, events: int = 5) -> dict[str, list[str | None]]:
    return {f"e{number}": [None] * world for number in range(events)}


def turns(schedule: Schedule, order: list[tuple[int, int]]) -> None:
    for rank, steps in order:
        for _ in range(steps):
            if not schedule.turn(rank):
                break


def to_their_end(schedule: Schedule, ranks: list[int]) -> None:
    """Turns for these ranks only: the others hang."""
    while any([schedule.turn(rank) for rank in ranks]):
        pass


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_hangs_before_any_step_agrees_with_the_others(world):
    """It hangs for as long as the others take to give up this event and four more, and to remove its files."""
    for hung, steps, ahead in itertools.product(range(world), range(14), (0, 6)):
        others = [rank for rank in range(world) if rank != hung]

        def steer(schedule: Schedule, hung=hung, steps=steps, ahead=ahead, others=others) -> None:
            turns(schedule, [(rank, ahead) for rank in others])
            turns(schedule, [(hung, steps)])
            to_their_end(schedule, others)

        in_new_folder(lambda folder, steer=steer: Trial(folder, all_ready(world), world, {}, {}).run(steer))


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_two_ranks_that_hang_before_any_steps_agree_with_the_third(every):
    """One may not even have voted, and do so when the third has given up five events and removed its files."""
    steps = range(1, 14, every)
    for (free, first, second), *counts in itertools.product(itertools.permutations(range(3)), (0, 2, 5), steps, steps):

        def steer(schedule: Schedule, free=free, first=first, second=second, counts=counts) -> None:
            turns(schedule, [(first, counts[0]), (free, 2), (second, counts[1])])
            to_their_end(schedule, [free])
            turns(schedule, [(first, counts[2])])
            to_their_end(schedule, [second])

        in_new_folder(lambda folder, steer=steer: Trial(folder, all_ready(3), 3, {}, {}).run(steer))


def test_whoever_saw_all_votes_cannot_commit_what_was_given_up(folder):
    """The hardest case, by itself: rank 1 hangs between its look and its commit; the others clean up behind them."""
    trial = Trial(folder, all_ready(3), 3, {}, {})
    names: list[set[str]] = []

    def steer(schedule: Schedule) -> None:
        turns(schedule, [(0, 3), (2, 3), (1, 4)])  # all have voted; rank 1 has looked and wants to read a decision
        schedule.now += 1  # for ranks 0 and 2 the deadline has passed ...
        agreement_of = folder / "agreement"
        assert sorted(os.listdir(agreement_of)) == [f"e0.{rank}.vote" for rank in range(3)]
        (agreement_of / "e0.1.vote").rename(folder / "hidden")  # ... before they could see its vote
        to_their_end(schedule, [0, 2])
        names.append(set(os.listdir(agreement_of)))

    trial.run(steer)
    assert names == [{"e3.decision", "e4.decision"}]


@st.composite
def trials(draw: st.DrawFn) -> tuple[dict[str, list[str | None]], int, dict[int, int], dict[int, set[int]], Any]:
    world = draw(st.integers(2, 4))
    votes = st.lists(st.sampled_from([None, None, None, None, None, "bad"]), min_size=world, max_size=world)
    problems = {f"e{number}": draw(votes) for number in range(draw(st.integers(1, 6)))}
    rank = st.integers(0, world - 1)
    kills = draw(st.dictionaries(rank, st.integers(0, 40), max_size=2))
    failures = draw(st.dictionaries(rank, st.sets(st.integers(1, 60), max_size=8), max_size=2))
    order = draw(st.lists(st.tuples(rank, st.sampled_from([1, 2, 3, 5, 8, 30, 100])), max_size=40))
    return problems, world, kills, failures, order


@settings(deadline=None, max_examples=300)
@given(trials())
def test_any_order_kills_and_failures(trial):
    problems, world, kills, failures, order = trial
    in_new_folder(lambda folder: Trial(folder, problems, world, kills, failures).run(lambda s: turns(s, order)))


@pytest.mark.slow
@settings(deadline=None, max_examples=3000)
@given(trials())
def test_any_order_leaves_no_file(trial):
    problems, world, _, _, order = trial
    in_new_folder(lambda folder: Trial(folder, problems, world, {}, {}).run(lambda s: turns(s, order)))


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_threads_with_real_delays(data):
    world = data.draw(st.integers(2, 4))
    delay = st.sampled_from([0, 0, 0, 0.001, 0.01, 0.02, 0.05])
    plan = [
        [(data.draw(delay), data.draw(st.sampled_from([None] * 6 + ["bad"]))) for _ in range(world)] for _ in "1234"
    ]

    def act(own: Agreement, rank: int) -> list[str | None]:
        answers = []
        for number, event in enumerate(plan):
            threading.Event().wait(event[rank][0])  # how late it comes
            answers.append(own.decide(f"e{number}", event[rank][1]))
        return answers

    def run(folder: Path) -> None:
        answers = together(agreements(folder, world, 0.02), act)
        for number, event in enumerate(plan):
            check([mine[number] for mine in answers], [problem for _, problem in event])

    in_new_folder(run)


# Processes.


@pytest.fixture(scope="module")
def processes() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["agreeing"])
    return context


@dataclass
class Child:
    process: BaseProcess
    pipe: Connection

    def answers(self, count: int) -> list[str | None]:
        """What it answered to its events, once it has answered all."""
        got: list[str | None] = []
        for _ in range(count):
            assert self.pipe.poll(60), "no answer within 60 s"
            got.append(self.pipe.recv())
        return got

    def longest(self) -> float:
        """Seconds of its slowest answer, after all of them were taken."""
        assert self.pipe.poll(60)
        return float(self.pipe.recv())

    def stopped(self) -> bool:
        try:
            facts = Path(f"/proc/{self.process.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return facts.rpartition(")")[2].split()[0] == "T"


@pytest.fixture
def start(processes) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def begin(*args: Any, **kwargs: Any) -> Child:
        pipe, theirs = processes.Pipe(duplex=False)
        process = processes.Process(target=rank_process, args=(theirs, *args), kwargs=kwargs, daemon=True)
        process.start()
        theirs.close()
        children.append(Child(process, pipe))
        return children[-1]

    yield begin
    for child in children:
        child.process.kill()
        child.process.join(30)
        assert not child.process.is_alive()


# A rank's steps through an event to which all come: it votes, looks (at times more than once), asks for a decision,
# links one, reads it, removes its vote.
STAGES = [
    ("os.open", 1),
    ("os.listdir", 1),
    ("os.listdir", 2),
    ("os.listdir", 3),
    ("open", 1),
    ("os.link", 1),
    ("open", 2),
    ("os.unlink", 1),
    ("os.open", 2),
]
WORLDS = [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
EVENTS: list[tuple[str, str | None]] = [(f"e{number}", None) for number in range(4)]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: f"{stage[0]}-{stage[1]}")
@pytest.mark.parametrize("world", WORLDS)
def test_a_process_stopped_at_any_stage_agrees(folder, start, world, stage):
    """The others give up four events meanwhile, and clean up."""
    for hung in range(world):
        own = folder / f"{hung}"
        fault = Fault(signal.SIGSTOP, *stage)
        children = [start(own, r, world, 0.05, EVENTS, fault if r == hung else None) for r in range(world)]
        answers = {rank: children[rank].answers(len(EVENTS)) for rank in range(world) if rank != hung}
        # It may end without a stop: not every rank takes every step.
        wait_for(lambda c=children[hung]: c.stopped() or not c.process.is_alive(), 60, "the stop")
        if children[hung].stopped():
            os.kill(children[hung].process.pid, signal.SIGCONT)
        answers[hung] = children[hung].answers(len(EVENTS))
        for event in range(len(EVENTS)):
            check([answers[rank][event] for rank in range(world)], [None] * world)
        assert all(UNKNOWN not in given for given in answers.values())


@pytest.mark.parametrize("stage", STAGES[:-1], ids=lambda stage: f"{stage[0]}-{stage[1]}")
@pytest.mark.parametrize("world", WORLDS)
def test_a_process_killed_at_any_stage_leaves_the_others_agreed(folder, start, world, stage):
    for dead in range(world):
        own = folder / f"{dead}"
        fault = Fault(signal.SIGKILL, *stage)
        children = [start(own, r, world, 0.1, EVENTS, fault if r == dead else None) for r in range(world)]
        answers = [children[rank].answers(len(EVENTS)) for rank in range(world) if rank != dead]
        for event in range(len(EVENTS)):
            assert len({given[event] is None for given in answers}) == 1, answers
            assert UNKNOWN not in [given[event] for given in answers]
        if stage == ("os.open", 1):
            assert all(given[0] is not None for given in answers), "committed without a vote"
        for rank in range(world):
            if rank != dead:
                assert children[rank].longest() < 0.1 + 5


def test_a_full_memory_file_system_makes_an_abort_not_an_unknown_state(folder, start):
    """Votes and commits need no room; an abort without room for words is one all the same."""
    full = [start(folder, rank, 3, 0.3, EVENTS[:1], file_size=1) for rank in range(2)]
    words = "a rank aborted and had no room to say why"
    assert [child.answers(1) for child in full] == [[words], [words]]
    full = [start(folder, rank, 2, LONG, [("f", None)], file_size=1) for rank in range(2)]
    assert [child.answers(1) for child in full] == [[None], [None]]
