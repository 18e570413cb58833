"""Every Python process with this folder on PYTHONPATH imports, as it starts, the modules that PROCESS_MODULES names.

OpenRLHF, Ray and vLLM have no hook that all of their processes run (vLLM's Ray executor refuses Ray's own one).
"""

from __future__ import annotations

import importlib
import os

for name in filter(None, os.environ.get("PROCESS_MODULES", "").split(",")):
    importlib.import_module(name)
