"""The engine's thread: takes requests in, plans a step, launches it, hands out what was drawn, and goes on.

Only this thread touches scheduler, cache and pages. Everybody else leaves a command in the inbox, which is read between two
steps; so a request can be stopped, and the cache be looked at, at any time without a lock. While the device works on a
step, prompts that have arrived are hashed on the threads that sent them, and their images run; what is left to do between
steps is proportional to the rows, and where the scheduler plans ahead (`overlap`) it is done while the device works on the
step behind.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from functools import partial

import torch

from perilune.errors import PeriluneError
from perilune.serve.answer import Answer
from perilune.serve.cache import HybridCache
from perilune.serve.engine import CacheEvent, EngineClosed, EngineFailed
from perilune.serve.engine_thread import EngineThread
from perilune.serve.flight import Flight, Stage
from perilune.serve.job import LocalJob
from perilune.serve.overlap import draw_needs_tokens, why_settled_first
from perilune.serve.runner import ModelRunner
from perilune.serve.runner.runner import Scores
from perilune.serve.sampling import Draw, Drawn, start_draw, token_logprobs
from perilune.serve.schedule import Plan, Scheduler, Sequence
from perilune.serve.schedule.sequence import ENDED
from perilune.serve.staging import Stopwatch
from perilune.serve.tiers import Tiers

EVENTS = 4096  # admissions that are remembered
LEASE_SECONDS = 3600.0  # that a session's prefixes are kept longer than others behind the pool


class DeviceLost(PeriluneError):
    """The device computes nothing more in this process."""


@dataclass(slots=True)
class Totals:
    """Counts since the engine was made.

    Attributes:
        steps: that ran; overlapped: that were launched behind another one under way.
        generated: tokens drawn; not those that were dropped because their answers had ended.
        failed: steps that raised.
        scheduler_seconds: planning and settling; step_seconds: running, drawing and telling.
        wait_seconds: of the latter, for the device.
    """

    steps: int = 0
    overlapped: int = 0
    generated: int = 0
    failed: int = 0
    scheduler_seconds: float = 0.0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def host_seconds(self) -> float:
        """All that the thread did for steps, waiting included."""
        return self.scheduler_seconds + self.step_seconds


class EngineCore(EngineThread):
    """Scheduler, cache and runner, and the thread that drives them.

    Args:
        cache: of the scheduler.
        scheduler: plans.
        runner: executes.
        tiers: memory behind the pool; None = there is none.

    Attributes:
        totals: see `Totals`.
        jobs: that have not ended.
    """

    def __init__(
        self, cache: HybridCache, scheduler: Scheduler, runner: ModelRunner, tiers: Tiers | None = None
    ) -> None:
        super().__init__()
        self.cache, self.scheduler, self.runner, self.tiers = cache, scheduler, runner, tiers
        self.totals = Totals()
        self.jobs: dict[int, LocalJob] = {}
        self.events: deque[CacheEvent] = deque(maxlen=EVENTS)
        self._events_seen = 0
        self._job_of: dict[str, LocalJob] = {}
        self._flights: deque[Flight] = deque()

    # ---- from any thread

    def submit(self, job: LocalJob) -> None:
        """Take a job in. EngineClosed: nothing is taken in any more."""
        self.post(lambda: self._begin(job))

    def abort(self, job: LocalJob) -> None:
        """Stop a job between two steps; its listener hears the end."""
        with contextlib.suppress(EngineClosed):  # which has told it the end
            self.post(lambda: self._abort(job))

    def position(self, job: LocalJob) -> int:
        """See `LocalJob.position`; as of some recent step."""
        return min((self.scheduler.queues.position(sequence) for sequence in job.prompts), default=0)

    # ---- on the engine's thread

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return self.scheduler.idle

    def begun(self) -> None:
        """Streams, events and recordings of this thread are the model's device's."""
        device = self.runner.model.device
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def fatal(self, error: BaseException) -> bool:
        """Whether the device is lost: after some errors, an access to memory that is not there for one, it refuses everything."""
        device = self.runner.model.device
        if device.type != "cuda" or not isinstance(error, Exception):
            return False
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return True
        return False

    def _begin(self, job: LocalJob) -> None:
        self.jobs[id(job)] = job
        if job.closed:
            self._forget(job)
            return
        job.begun()
        for sequence in job.sequences:
            self._job_of[sequence.name] = job
        for sequence in job.prompts:
            if self.tiers is None:
                self.scheduler.add(sequence)
            else:
                self.tiers.prefetch(sequence.chain, partial(self._queue, job, sequence), self.inbox.put)

    def _queue(self, job: LocalJob, sequence: Sequence) -> None:
        """What a sequence can skip is in the pool, as far as it can be."""
        if sequence.state != ENDED:
            self.scheduler.add(sequence)
            if self.tiers is not None and job.service.session_id:
                self.tiers.lease(job.service.session_id, sequence.chain, LEASE_SECONDS)

    def _abort(self, job: LocalJob) -> None:
        if id(job) in self.jobs:
            self._forget(job)

    def _forget(self, job: LocalJob, error: BaseException | None = None) -> None:
        """A job is over: end what still runs of it, then tell."""
        for sequence in reversed(job.sequences):  # followers first, or they would be queued when their leader ends
            self.scheduler.end(sequence)
            self._job_of.pop(sequence.name, None)
        self.jobs.pop(id(job), None)
        job.end(error)

    def end(self, error: BaseException) -> None:
        """All jobs are over."""
        self._flights.clear()  # nobody is left to hear of them
        for job in list(self.jobs.values()):
            job.end(error)

    def ended(self) -> None:
        """The thread ends, and not by a fault."""
        if self.tiers is not None:
            self.tiers.close()

    def step(self) -> bool:
        """Plan a step and launch it, and settle those before it; False if there is nothing to do now.

        The launched one stays under way if the next one may be planned before its end; else it is settled, too.
        """
        flight, running_on = self._launch(), False
        if flight is not None:
            self._flights.append(flight)
            whole = len(flight.stages) == len(flight.plan.stages)
            running_on = self.scheduler.ahead and whole and why_settled_first(flight.plan, self.scheduler) is None
        progress = bool(self._flights)
        while len(self._flights) > running_on:
            self._settle_oldest()
        return progress

    def settle(self) -> None:
        """Settle all steps under way."""
        while self._flights:
            self._settle_oldest()

    def _launch(self) -> Flight | None:
        """Plan a step and begin it; None if nothing can be computed now."""
        began = time.perf_counter()
        plan = self.scheduler.plan()
        self._settle_refused()
        planned = time.perf_counter()
        self.totals.scheduler_seconds += planned - began
        if plan is None:
            return None
        self._note_started(plan, began)
        flight, settling = Flight(plan), self.totals.host_seconds
        if plan.prefill and self._flights and not self._flights[-1].plan.prefill:
            self.settle()  # its launch takes longer than a step of decoding: tell first what there is to tell
        self.totals.overlapped += bool(self._flights)
        try:
            for _ in plan.stages if self.runner.launches else plan.stages[:1]:
                self._launch_stage(flight)
        except Exception as error:
            flight.error = error
        settling = self.totals.host_seconds - settling  # of steps before this one, which has been counted
        self.totals.step_seconds += time.perf_counter() - planned - settling
        return flight

    def _launch_stage(self, flight: Flight) -> None:
        watch = Stopwatch(self.runner.model.device)
        scores = self.runner.run(flight.plan, len(flight.stages))
        if self._flights and draw_needs_tokens(scores.rows):
            self.settle()
        draw = self._draw(flight.plan, scores)
        if draw is not None:
            self.runner.keep(scores.rows, draw.ids_B)
        watch.stop()
        flight.stages.append(Stage(scores.rows, draw, watch))

    def _settle_oldest(self) -> None:
        """Hear what the oldest step has drawn, tell it, and end the step."""
        flight, began = self._flights.popleft(), time.perf_counter()
        plan, totals = flight.plan, self.totals
        told: list[Sequence] = []  # whose answers are whole
        drawn: dict[str, int] = {}
        try:
            for stage in range(len(plan.stages)):
                if stage == len(flight.stages):
                    if flight.error is not None:
                        raise flight.error
                    self._launch_stage(flight)
                since = time.perf_counter()
                some, seconds = flight.stages[stage].read()
                now = time.perf_counter()
                totals.wait_seconds += now - since
                self.scheduler.took(plan, stage, seconds)
                told += self._tell(plan, some, now)
                drawn |= {name: one.token_id for name, one in some.items()}
        except Exception as error:
            if self.fatal(error):
                raise DeviceLost(f"the device refuses to go on after an error: {error}") from error
            self._fail(plan, error)
            return
        ran = time.perf_counter()
        self.scheduler.finish(plan, drawn)
        for sequence in told:  # ended only now, so that what this step computed of them is cached
            self.scheduler.end(sequence)
            self._forget_whole(sequence)
        totals.steps += 1
        totals.scheduler_seconds += time.perf_counter() - ran
        totals.step_seconds += ran - began

    def _settle_refused(self) -> None:
        for sequence, error in self.scheduler.refused:
            job = self._job_of.get(sequence.name)
            if job is not None:
                self._forget(job, error)
        self.scheduler.refused.clear()

    def _note_started(self, plan: Plan, now: float) -> None:
        for row in plan.prefill:
            sequence, answer = row.sequence, row.sequence.content
            if not answer.started:
                answer.started = now
                self._events_seen += 1
                name = self._job_of[sequence.name].request_id or sequence.name
                self.events.append(
                    CacheEvent(
                        self._events_seen, time.time(), name, sequence.prompt, sequence.resume or 0, sequence.known
                    )
                )

    def _draw(self, plan: Plan, scores: Scores) -> Draw | None:
        """The next token of every row of a stage that ends with its last one."""
        for row in plan.prefill:
            if row.sequence.name in scores.prompt:
                self._score_prompt(row.sequence, row.chunk.start, scores.prompt[row.sequence.name])
        answers: list[Answer] = [row.sequence.content for row in scores.rows]
        if not answers:
            return None
        return start_draw([one.sampling for one in answers], scores.together(), [one.mask() for one in answers])

    @staticmethod
    def _score_prompt(sequence: Sequence, start: int, logits_TZ: torch.Tensor) -> None:
        """Log-probabilities of the prompt's tokens that follow those of a chunk; a preempted one's come twice."""
        answer = sequence.content
        first = start + 1 + max(0, len(answer.prompt_logprobs) - start)
        following = sequence.ids[first : min(start + 1 + len(logits_TZ), sequence.prompt)]
        if following:
            rows = logits_TZ[first - start - 1 :][: len(following)]
            answer.prompt_logprobs += token_logprobs(rows, following, [answer.params.prompt_logprobs] * len(following))

    def _tell(self, plan: Plan, drawn: dict[str, Drawn], now: float) -> list[Sequence]:
        """Hand out what a stage has drawn; returns the sequences whose answers are whole with it."""
        whole: list[Sequence] = []
        for row in plan.rows:
            sequence, answer = row.sequence, row.sequence.content
            job = self._job_of.get(sequence.name)
            if sequence.name not in drawn or job is None or answer.finish_reason is not None:
                continue  # in the last case it had ended at the step before, and this row was planned too early to know
            self.totals.generated += 1
            answer.first, answer.last = answer.first or now, now
            try:
                delta = answer.take(drawn[sequence.name])
                if delta is not None:
                    job.push(delta)
            except Exception as error:  # of this answer's grammar or reader: the others go on
                self._forget(job, error if isinstance(error, PeriluneError) else _failure(error))
                continue
            if answer.finish_reason is not None:
                whole.append(sequence)
        return whole

    def _forget_whole(self, sequence: Sequence) -> bool:
        """A sequence's answer is whole; if all of its job's are, the job is over."""
        job = self._job_of.get(sequence.name)
        over = job is not None and all(one.finish_reason is not None for one in job.answers)
        if job is not None and over:
            self._forget(job)
        return over

    def _fail(self, plan: Plan, error: Exception) -> None:
        """A step raised: its jobs end with an error, all others go on. What was told in full before is not taken back."""
        self.totals.failed += 1
        failure = error if isinstance(error, PeriluneError) else _failure(error)
        for sequence in self.scheduler.fail(plan):
            job = self._job_of.get(sequence.name)
            if job is not None and not self._forget_whole(sequence):
                self._forget(job, failure)


def _failure(error: Exception) -> EngineFailed:
    failed = EngineFailed(
        f"the model failed while this request was running ({type(error).__name__}: {error}); ask again"
    )
    failed.__cause__ = error
    return failed
