"""Every error that SparrowRL raises on purpose, in one tree.

    SparrowError
    ├── ConfigError            a setting, flag or environment variable is wrong or missing
    ├── FormatError            bytes that are not what docs/format.md says
    │   ├── UnsupportedFormat      a format version this reader does not know
    │   ├── CorruptData            truncated, or a checksum or MAC that does not match
    │   └── LimitExceeded          a length beyond the limits of docs/format.md
    ├── LayoutError            a tensor name, shape or dtype that the layout does not have
    ├── JournalError           the journal on disk
    │   ├── JournalLocked          another writer is at work
    │   ├── VersionConflict        a commit that does not follow the newest version
    │   └── VersionNotFound        no such version, or none that can be reached from here
    ├── StateError             weights that are not at the state they should be at
    │   ├── WrongBase              an artifact whose base is not the state at hand
    │   ├── FingerprintMismatch    weights whose fingerprints differ from the manifest's
    │   └── UnknownState           an engine that cannot say what it holds; restore an anchor
    ├── PlacementError         checkpoint weights that cannot be mapped to the engine's tensors
    ├── TransportError         hub, agent and what lies between
    │   ├── Unauthorized           a token that the hub refuses
    │   ├── RemoteRefused          the other side answered with an error of its own
    │   └── DeadlineExceeded       nothing came in time
    ├── EngineUnsupported      a vLLM version or feature that was not tested
    ├── FrameworkUnsupported   a version or setting of verl or OpenRLHF that this plugin does not work with
    └── EngineDied             an engine's process that has ended, or does not answer any more

Each message is one line that says what was expected, what came, and what to do.
"""


class SparrowError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(SparrowError):
    """A setting, flag or environment variable is wrong or missing."""


class FormatError(SparrowError):
    """Bytes that do not follow docs/format.md."""


class UnsupportedFormat(FormatError):
    """A format version that this reader does not know."""


class CorruptData(FormatError):
    """Truncated bytes, or a checksum or MAC that does not match."""


class LimitExceeded(FormatError):
    """A length beyond the limits of docs/format.md."""


class LayoutError(SparrowError):
    """A tensor name, shape or dtype that the layout does not have."""


class JournalError(SparrowError):
    """The journal on disk cannot do what was asked."""


class JournalLocked(JournalError):
    """Another writer holds the journal."""


class VersionConflict(JournalError):
    """A commit that does not follow the newest version."""


class VersionNotFound(JournalError):
    """No such version, or none that can be reached from the given one."""


class StateError(SparrowError):
    """Weights that are not at the state they should be at."""


class WrongBase(StateError):
    """An artifact whose base is not the state at hand."""


class FingerprintMismatch(StateError):
    """Weights whose fingerprints differ from those of the manifest."""


class UnknownState(StateError):
    """An engine that cannot say what it holds until an anchor restores it."""


class PlacementError(SparrowError):
    """Checkpoint weights that cannot be mapped to the engine's tensors."""


class TransportError(SparrowError):
    """A failure of the hub, the agent or the way between them."""


class Unauthorized(TransportError):
    """A token that the hub refuses."""


class RemoteRefused(TransportError):
    """The other side answered with an error of its own."""


class DeadlineExceeded(TransportError):
    """Nothing came before the deadline."""


class EngineUnsupported(SparrowError):
    """A vLLM version or feature that was not tested."""


class FrameworkUnsupported(SparrowError):
    """A version or setting of verl or OpenRLHF that this plugin does not work with."""


class EngineDied(SparrowError):
    """An engine's process that has ended, or does not answer any more."""
