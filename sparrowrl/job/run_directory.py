"""Where a run is kept on the trainer's first node: its journal, and the credentials file beside it."""

from __future__ import annotations

import logging
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from sparrowrl.config import Credentials
from sparrowrl.errors import ConfigError

logger = logging.getLogger(__name__)

# Ray ends its workers without their exit handlers, and kills their child processes. So a process of a session of its
# own, whose parent is gone at once, deletes the directory when its input ends. The shell gives what it starts in the
# background another input, hence the 3.
_DELETE_AT_END = 'exec 3<&0; (cat <&3; rm -rf -- "$1") >/dev/null 2>&1 &'


class RunDirectory:
    """A journal directory with credentials: the one that was asked for, which stays, or a temporary one.

    A temporary one is deleted by `close`, or when this process ends, however that happens.
    """

    def __init__(self, journal_dir: str | None, run: str) -> None:
        """Make what is not there yet. Raises ConfigError if that fails, or the credentials are another run's."""
        self._reaper: subprocess.Popen[bytes] | None = None
        if journal_dir is None:
            try:
                self.path = Path(tempfile.mkdtemp(prefix="sparrowrl-journal-"))
                self._reaper = _start_reaper(self.path)
            except OSError as error:
                raise ConfigError(f"no temporary directory for the journal: {error}; give a journal_dir") from error
            logger.warning("run %s: its journal is in %s, until this job ends; journal_dir keeps it", run, self.path)
        else:
            self.path = Path(journal_dir)
            logger.info("run %s: its journal is in %s", run, self.path)
        self.credentials_file = self.path / "credentials.json"
        self.credentials = self._have_credentials(run)

    def _have_credentials(self, run: str) -> Credentials:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                Credentials.new(run).save(self.credentials_file)
        except OSError as error:
            raise ConfigError(f"journal_dir {self.path}: cannot write there: {error.strerror or error}") from error
        found = Credentials.load(self.credentials_file)
        if found.run != run:
            raise ConfigError(
                f"{self.credentials_file}: expected credentials of run {run}, got those of run {found.run}; "
                f"give this run a journal_dir of its own, or say run={found.run} to go on with that one"
            )
        if found.writer is None:
            raise ConfigError(f"{self.credentials_file}: expected the trainer's credentials, got a copy for engines")
        return found

    def close(self) -> None:
        """Delete a temporary directory; doing it twice is fine."""
        if self._reaper is None:
            return
        assert self._reaper.stdin is not None
        shutil.rmtree(self.path, ignore_errors=True)
        self._reaper.stdin.close()
        self._reaper = None


def _start_reaper(path: Path) -> subprocess.Popen[bytes]:
    """Have the directory deleted when this process is gone, or closes the pipe to what is returned."""
    command = ["/bin/sh", "-c", _DELETE_AT_END, "sparrowrl", str(path)]
    reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    reaper.wait(20)
    return reaper
