"""A framework's whole job on a CPU, for the examples: started, followed a line a step, and ended with all it started.

What differs between frameworks is in their folders: the job's flags, its command line, and how its metrics are read.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from sparrowrl.errors import ConfigError, DeadlineExceeded, EngineDied, SparrowError
from sparrowrl.examples.gsm8k_grpo import step_table
from sparrowrl.examples.gsm8k_grpo.console import Console
from sparrowrl.examples.gsm8k_grpo.process_tree import ProcessTree

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.2
# Ray colours what it puts before a line, in a file too.
RAY_PREFIX = re.compile(r"^(?:\x1b\[\d+m)*\([^)]*pid=\d+[^)]*\)(?:\x1b\[\d+m)* ?|\x1b\[\d+m")
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Unsupported|Exceeded|Mismatch|Died): .+")
_CAUSES = 3
_LAST_LINES = 6


class Job(Protocol):
    """What is run. `out` is its folder, `log` the file in it that takes what all of its processes say."""

    @property
    def framework(self) -> str:
        """Its name."""
        ...

    @property
    def steps(self) -> int:
        """How many are to be trained."""
        ...

    @property
    def out(self) -> Path: ...

    @property
    def log(self) -> Path: ...

    @property
    def deadline_s(self) -> float: ...

    def command(self, temporary: Path) -> list[str]:
        """What to start. Ray keeps its sockets in `temporary`, whose name is short."""
        ...

    def environment(self, temporary: Path) -> dict[str, str]:
        """With which environment."""
        ...

    def __str__(self) -> str:
        """In a line."""
        ...


class Progress(Protocol):
    """What the job has logged so far: `trained` steps, `wrong` of them with live weights that were not proved."""

    trained: int
    wrong: int

    def news(self) -> list[str]:
        """A line for each step that was logged since the last call."""
        ...


def status_of(work: Callable[[Console], None]) -> int:
    """Do it, and say what went wrong; the exit status.

    0 if all steps were trained and all engines were proved exact, 1 if not, 2 for wrong settings, 130 if interrupted.
    """
    console = Console()
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    try:
        work(console)
    except ConfigError as error:
        console.say(f"ConfigError: {error}")
        return 2
    except SparrowError as error:
        console.say(f"{type(error).__name__}: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def check_environment(framework: str, version: str) -> None:
    """Raise ConfigError unless this environment has the framework, and vLLM's CPU build."""
    found = {name: _version(name) for name in (framework, "vllm")}
    if found[framework] != version:
        raise ConfigError(
            f"expected {framework} {version}, got {found[framework]}; run `make .venv-frameworks/.installed`"
        )
    if "cpu" not in found["vllm"]:
        raise ConfigError(f"expected vLLM's CPU build, got {found['vllm']}; on a GPU run the scripts beside this file")


def clear(out: Path, made: set[str]) -> None:
    """Make the folder of the run, without what an earlier run has `made` there.

    Raises ConfigError if it holds anything else.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        foreign = sorted({path.name for path in out.iterdir()} - made)
        if foreign:
            raise ConfigError(
                f"--out {out}: expected a new folder or that of an earlier run, but it holds {foreign[0]}"
            )
        for path in out.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise ConfigError(f"--out {out}: {error}") from error


def run(job: Job, progress: Progress, console: Console) -> None:
    """Train, and tell `console` of each step. Whatever happens, no process is left behind.

    Raises EngineDied if the job ended before the last step or failed, DeadlineExceeded, ConfigError.
    """
    # Under /tmp, because Ray's sockets have long names and a socket's name at most 107 characters.
    temporary = Path(tempfile.mkdtemp(prefix="sparrowrl-", dir="/tmp"))
    tree = None
    try:
        tree = ProcessTree(job.command(temporary), job.out, job.log, job.environment(temporary))
        console.say(f"{job.framework:8} {job}; its log is {job.log}")
        for line in step_table.header():
            console.say(line)
        _follow(job, console, tree, progress)
    except SparrowError:
        for line in last_words(job.log) if tree is not None else []:
            console.say(line)
        raise
    finally:
        _end(tree, temporary)
    console.say(f"result   {progress.trained} steps trained; see {job.out}")


def environment(temporary: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of all frameworks: one thread a process, no cluster that happens to run here, no reports home."""
    told = {
        "TMPDIR": str(temporary),
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # Ray kills processes on a machine whose memory others use
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHDYNAMO_DISABLE": "1",  # no compiler at the first request
    }
    return {**{name: value for name, value in inherited.items() if name != "RAY_ADDRESS"}, **told}


def last_words(log: Path) -> list[str]:
    """The last exceptions that the job's processes have logged, and the last lines of all."""
    lines = [RAY_PREFIX.sub("", line) for line in log.read_text(errors="replace").replace("\r", "\n").splitlines()]
    causes = list(dict.fromkeys(line for line in lines if _EXCEPTION.match(line)))[-_CAUSES:]
    shown = [f"{log} says:", *causes] if causes else []
    return [line[:300] for line in [*shown, f"{log} ends with:", *lines[-_LAST_LINES:]]]


def _follow(job: Job, console: Console, tree: ProcessTree, progress: Progress) -> None:
    deadline = time.monotonic() + job.deadline_s
    ended = False
    while not ended:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{job.framework} has not ended within {job.deadline_s:g} s; see --deadline and {job.log}"
            )
        time.sleep(_POLL_S)
        ended = tree.status is not None
        for line in progress.news():
            console.say(line)
        console.progress(f"{progress.trained} of {job.steps} steps")
    if tree.status != 0 or progress.trained < job.steps or progress.wrong:
        raise EngineDied(
            f"{job.framework}: expected {job.steps} steps with exact engines, got {progress.trained}, "
            f"{progress.wrong} of them with others, and exit status {tree.status}"
        )


def _end(tree: ProcessTree | None, temporary: Path) -> None:
    """Nothing interrupts this."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if tree is not None:
        tree.end()
    shutil.rmtree(temporary, ignore_errors=True)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
