"""The job's first process: a Ray of its own with made-up GPUs, then OpenRLHF's command line with our sync backend.

python -m sparrowrl.examples.gsm8k_grpo.openrlhf.cpu_start FOLDER GPUS <OpenRLHF's flags>
"""

from __future__ import annotations

import sys

import ray

from sparrowrl.openrlhf_plugin import train_ppo_ray

_CPUS = 64  # what the processes ask for, though they share the cores that there are
_OBJECT_STORE = 256 << 20


def main() -> int:
    """OpenRLHF takes a Ray that is initialized already as it is. Returns the exit status."""
    folder, gpus, *flags = sys.argv[1:]
    ray.init(
        address="local",  # not a cluster that happens to run here
        num_cpus=_CPUS,
        num_gpus=int(gpus),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE,
        _temp_dir=folder,
    )
    return train_ppo_ray.main(flags)


if __name__ == "__main__":
    sys.exit(main())
