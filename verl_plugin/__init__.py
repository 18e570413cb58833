"""verl's checkpoint-engine backend "sparrow" (docs/verl.md).

verl imports this module in each of its processes (entry point `verl.plugins`), and once more where its configuration
says `custom_backend_module=sparrowrl.verl_plugin`. It imports nothing heavy: `hooks` waits for verl's own imports.
"""

from sparrowrl.verl_plugin import hooks

hooks.install()
