"""When a process of ours leaves: told by a signal, or because the process that started it is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress


def call_when_told(stop: Callable[[], None], *, or_input_ends: bool) -> None:
    """Have the running loop call `stop` on SIGTERM and SIGINT, and perhaps at the end of standard input.

    Who starts this process holds its standard input open, and the kernel closes that however its holder ends.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)

    def wait_for_end_of_input() -> None:
        with suppress(OSError):
            while os.read(0, 4096):
                pass
        with suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(stop)

    if or_input_ends:
        threading.Thread(target=wait_for_end_of_input, name="stdin", daemon=True).start()
