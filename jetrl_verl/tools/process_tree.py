# Copyright 2026 The jetrl_verl Authors
# SPDX-License-Identifier: Apache-2.0
"""Run a program that starts many others (Ray daemons, vLLM engines) and end all of them with it.

Ray's daemons leave their session and process group, so this process becomes a child subreaper, which adopts every
orphan below it: what the program started is this process's descendants minus those it had before.
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import psutil

SHARED_MEMORY = Path("/dev/shm")
_POLL_SECONDS = 0.25
_SHARED_FILES_SECONDS = 5.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Interrupted(Exception):
    """SIGINT, SIGTERM or SIGHUP arrived; ``signal`` says which."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.signal = signal.Signals(number)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_raise():
    """Turn the first of ``SIGNALS`` into ``Interrupted`` in the main thread; later ones cannot stop the clean-up."""

    def handle(number, frame):
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise Interrupted(number)

    previous = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def signals_wait():
    """Deliver ``SIGNALS`` that arrive inside on leaving, so that a clean-up finishes first."""
    arrived = []
    previous = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])


class ProcessTree:
    """A running program and everything it starts, as a context manager.

    Leaving the context terminates what is left of the tree and removes its temporary folder, and the ``/dev/shm``
    files that the tree had open and no process has any more.

    Args:
        command: program and arguments.
        environment: complete environment of the program; ``TMPDIR`` and ``RAY_TMPDIR`` are set here.
        log: file that receives stdout and stderr of the program.
        grace: seconds between asking processes to end and killing them.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, grace: float = 8.0):
        if not sys.platform.startswith("linux"):
            raise RuntimeError("Linux is needed: child subreapers end what Ray and vLLM start")
        self._command, self._environment, self._log, self._grace = list(command), dict(environment), log, grace
        self._child: subprocess.Popen | None = None
        self._shared_files: set[Path] = set()

    def __enter__(self) -> "ProcessTree":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot become a child subreaper")
        self._before = set(psutil.Process().children(recursive=True))
        # A short path: Ray puts Unix sockets below it, whose paths may not exceed 107 characters.
        self.temporary = Path(tempfile.mkdtemp(prefix="jetrl-", dir="/tmp"))
        environment = {**self._environment, "TMPDIR": str(self.temporary), "RAY_TMPDIR": str(self.temporary)}
        try:
            with self._log.open("wb") as output:
                self._child = subprocess.Popen(
                    self._command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches this process only
                )
        except BaseException:  # an interruption here must end what was just started
            self.end()
            raise
        return self

    def poll(self) -> int | None:
        """Exit status of the program itself, or None while it runs."""
        return self._child.poll()

    def follow(self) -> Iterator[None]:
        """Yield every quarter of a second while the program runs, and once more when all of its output is there."""
        noted = time.monotonic()
        while True:
            ended = self.poll() is not None  # before the caller reads
            yield
            if ended:
                return
            if time.monotonic() - noted > _SHARED_FILES_SECONDS:
                self.note_shared_files()
                noted = time.monotonic()
            time.sleep(_POLL_SECONDS)

    def wait(self) -> int:
        """Exit status of the program, once it has ended."""
        for _ in self.follow():
            pass
        return self.poll()

    def processes(self) -> list[psutil.Process]:
        """Everything the program started that has not ended; reaps zombies."""
        alive = []
        for process in psutil.Process().children(recursive=True):
            if process in self._before:
                continue
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
                elif self._is_adopted(process):
                    with suppress(ChildProcessError):
                        os.waitpid(process.pid, os.WNOHANG)
        return alive

    def _is_adopted(self, process: psutil.Process) -> bool:
        """Whether this process must reap ``process``; ``Popen`` reaps the program."""
        return process.ppid() == os.getpid() and (self._child is None or process.pid != self._child.pid)

    def note_shared_files(self) -> None:
        """Remember which ``/dev/shm`` files the tree has mapped."""
        for process in self.processes():
            self._shared_files |= _shared_files_of(process.pid)

    def end(self) -> None:
        """Terminate the tree and remove its files. Raises ``RuntimeError`` if a process survives SIGKILL."""
        with signals_wait():
            self.note_shared_files()
            asked: set[psutil.Process] = set()
            started = time.monotonic()
            while alive := self.processes():
                waited = time.monotonic() - started
                if waited > 2 * self._grace:
                    left = ", ".join(str(process.pid) for process in alive)
                    raise RuntimeError(f"processes {left} survived SIGKILL. End them by hand.")
                for process in alive:
                    with suppress(psutil.NoSuchProcess):
                        if waited > self._grace:
                            process.kill()
                        elif process not in asked:  # a process may have been forked since the last round
                            asked.add(process)
                            process.terminate()
                time.sleep(0.05)
            if self._child is not None:
                self._child.wait()
            self._remove_files()

    def _remove_files(self) -> None:
        in_use = set()
        for pid in psutil.pids():
            in_use |= _shared_files_of(pid)
        for path in self._shared_files - in_use:
            path.unlink(missing_ok=True)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


_SHARED_PATH = re.compile(rf"{SHARED_MEMORY}/[^\n]*")


def _shared_files_of(pid: int) -> set[Path]:
    """Existing ``/dev/shm`` files that process ``pid`` has mapped; empty where this is not permitted."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()
    # "(deleted)" marks files that have no name any more, such as Ray's object store.
    return {Path(path) for path in _SHARED_PATH.findall(maps) if not path.endswith(" (deleted)")}
