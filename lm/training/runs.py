"""`Runs`: runs that train side by side, take turns, and are saved and stopped together."""

import threading
import time
from collections.abc import Iterator

from lm.common.errors import UsageError
from lm.engine.engine import CHECKPOINT_WRITER
from lm.storage.checkpoint import write_checkpoint
from lm.storage.folder import RunFolder
from lm.training.build import random_state, restore_random, select_engine
from lm.training.checkpoint_writer import copy_state, prune
from lm.training.interruption import StopRequest, leave_note
from lm.training.results import say_stopped, write_page, write_results
from lm.training.run import Run


class Runs:
    """The unfinished runs of a program, most often one run. `folders` are those of all runs."""

    def __init__(self, stop: StopRequest):
        self.stop = stop
        self.all: list[Run] = []
        self.folders: list[RunFolder] = []
        self.stopped: tuple[int, str] | None = None  # the last step and the reason to stop
        self._left: dict[Run, tuple] = {}  # random state and time when the turn of a run ended
        self._writer = threading.Thread()  # writes the latest checkpoint of each run
        self._saved = True  # whether it was written; true on other processes than the main one

    def add(self, run: Run) -> None:
        """Add a run that is ready for its first step. It is its turn now."""
        self.all.append(run)
        self._end_turn(run)

    def in_turn(self) -> Iterator[Run]:
        """Yield each run after switching to its engine and random state. In the throughput
        of a run, the turns of other runs do not count."""
        for run in self.all:
            select_engine(run.engine)
            if len(self.all) > 1:
                random, ended = self._left[run]
                run.log.paused += time.perf_counter() - ended
                restore_random(random, run.accelerator.device)
            yield run
            if len(self.all) > 1:
                self._end_turn(run)

    def _end_turn(self, run: Run) -> None:
        self._left[run] = random_state(run.accelerator.device), time.perf_counter()

    def repeat_validations(self) -> None:
        """After a resume, make up for validations and samples that a stop request prevented."""
        step, repeats = self.all[0].inputs.start.step, False
        for run in self.in_turn():
            is_due = step and run.val_loader and run.is_time(step, run.args.eval_interval)
            if is_due and run.val_loss is None:
                run.evaluate(step)
                repeats = True
        if repeats:
            self.end(step)

    def end(self, step: int) -> None:
        """Save all runs if one run is due, --save_minutes have passed, or a stop is requested."""
        reason = self.stop.reason()
        due = [run.is_time_to_save(step) for run in self.all]
        if reason or self.stop.time_to_save or any(due):
            self.save(step)
        if reason and (step < self.all[0].total_steps or any(run.interrupted for run in self.all)):
            self.stopped = step, reason

    def save(self, step: int) -> None:
        """Copy the state of each run; a thread writes it while training goes on. The copy of a run
        waits until that of the run before is written, so that memory holds one copy."""
        for run in self.in_turn():
            with run.log.pause():
                self._saved = self.wait() or run is self.all[0]
                started = time.perf_counter()
                tensors, scalars = copy_state(run.state, run.log.meter)
                state = {"step": step, "val_loss": run.val_loss} | run.facts | scalars
                run.saved_loss = run.val_loss
                if run.engine.is_main:
                    work = (run, tensors, state, time.perf_counter() - started)
                    self._writer = threading.Thread(None, self._write, CHECKPOINT_WRITER, work)
                    self._writer.start()
        self.stop.saved()

    def _write(self, run: Run, tensors: dict, state: dict, stalled: float) -> None:
        """Write a checkpoint. A disk error is logged, does not stop training, and leaves the older
        checkpoints of all runs, because runs resume from a common step."""
        try:
            size = write_checkpoint(run.folder, tensors, state) / 1e6
        except Exception as error:  # an uncaught error would print a traceback
            run.log.say(f"CHECKPOINT NOT SAVED: {error}; older ones are kept")
            self._saved = False
            return
        path = run.folder.checkpoint(state["step"])
        run.log.say(f"saved {path}: {size:.1f} MB; copying took {stalled:.2f} s")
        if self._saved and run is self.all[-1]:
            for each in self.all:
                prune(each.folder, each.args.keep_last)

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint is being written, on the main process."""
        return self._writer.is_alive()

    def wait(self) -> bool:
        """Wait for the save in progress, if any; return False if the latest save failed. Only the
        main process knows this; other processes return True."""
        if self._writer.ident:  # the thread was started
            self._writer.join()
        return self._saved

    def finish(self) -> None:
        """Write the results of each run; after a stop request, print how to resume instead. Then
        raise UsageError if the last save failed."""
        saved, main = self.wait(), self.all[0].accelerator
        if self.stopped:
            if main.is_main_process:
                say_stopped(self.folders, *self.stopped, saved)
            if saved and main.is_local_main_process:
                leave_note()
        else:
            for run in self.in_turn():
                weights = run.state.weights()
                if main.is_main_process:
                    write_results(run.inputs, weights, run.log)
            if main.is_main_process and len(self.folders) > 1:
                print(f"\nreport of all runs: {write_page(self.folders)}", flush=True)
        for run in self.all:
            run.log.close()
            run.accelerator.end_training()
        if not saved:
            raise UsageError("the last checkpoint was not saved, see CHECKPOINT NOT SAVED above")
