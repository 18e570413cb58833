"""What a rank learns when it is attached to a run: where its weights are, and what the ranks hold together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from sparrowrl.delta.layout import U64_MASK, Layout
from sparrowrl.errors import FingerprintMismatch, PlacementError
from sparrowrl.kernels.bits import INT_OF_WIDTH
from sparrowrl.kernels.fingerprint import fingerprint
from sparrowrl.vllm_worker_ext.agreement import Agreement
from sparrowrl.vllm_worker_ext.attributes import Attributes
from sparrowrl.vllm_worker_ext.census import Census, Parts, holdings, take
from sparrowrl.vllm_worker_ext.lora import without_lora
from sparrowrl.vllm_worker_ext.placement import Placement, make_plan, place
from sparrowrl.vllm_worker_ext.processing import loaded, processed
from sparrowrl.vllm_worker_ext.reload import Reload, checkpoint_weights
from sparrowrl.vllm_worker_ext.staging import synchronize
from sparrowrl.vllm_worker_ext.tracing import Trace, trace_loader


@dataclass(slots=True)
class Attachment:
    """One rank's way from checkpoint coordinates to its tensors.

    `reload` is None where all weights are direct. `digest` are its runtime bytes as they should be; None as long as it
    was not proved that reloading makes them what the mirrors say.
    """

    model: Any
    placement: Placement
    census: Census
    reload: Reload | None
    digest: bytes | None = None

    def live_parts(self) -> Parts:
        """What all weights of this rank, read now, add to the fingerprints: u64[tensors]."""
        layout, live = self.placement.layout, self.placement.live
        synchronize(self.placement.device)
        totals = np.zeros(len(layout), dtype=np.uint64)
        for n, (seed, pieces) in enumerate(zip(layout.seeds, self.placement.pieces, strict=True)):
            sums = [fingerprint(bits, seed, *box) for piece in pieces for bits, *box in piece.rows(live[piece.live])]
            totals[n] = sum(int(part) for part in sums) & U64_MASK
        return totals

    def carry(self, held: bool = True) -> None:
        """Have the model's own loader bring what the mirrors hold into the engine, and prove that it can.

        As long as that is not proved, `held` says whether the engine holds the very weights of the mirrors.
        """
        if self.reload is None:
            return
        with without_lora(self.model):
            if self.digest is None:
                self.digest = self.reload.prove(self.placement.mirrored, held)
                return
            self.reload.run_all(self.placement.mirrored())
            self.digest = self.reload.digest()

    def check_carried(self) -> None:
        """Raise FingerprintMismatch if the runtime bytes are not those that the last reload left."""
        if self.reload is not None and self.digest is not None and self.reload.digest() != self.digest:
            raise FingerprintMismatch(
                "opaque and derived weights: expected the bytes that the last reload left, got others"
            )


def learn(
    model: Any,
    vllm_config: Any,
    layout: Layout,
    ranks: Agreement,
    event: str,
    within: str,
    unused: Sequence[str],
    distrusted: Iterable[int] = (),
) -> Attachment:
    """Find out where the tensors of `layout` live in this rank and the others. Writes nothing to the engine.

    What the ranks share is called after `event`, in the course of what they decide as `within`. The `distrusted`
    tensors are taken for processed after loading, whatever was seen of it. All ranks must call this together. Raises
    PlacementError, naming the tensor.
    """
    own = [one.module for one in processed(model) if one.own]
    derived = [one.module for one in processed(model) if not one.own]
    with without_lora(model):
        trace = _trace(model, vllm_config, layout, own)
        places = {piece.live for n in distrusted for piece in trace.pieces[n]}
        if suspects := {m for place in places for m in trace.storages.owners[place]} - {*own, *derived}:
            own += [module for module in model.modules() if module in suspects]
            trace = _trace(model, vllm_config, layout, own)
    own_or_missed = [*own, *_missed(model, trace)]
    plan = make_plan(trace, own_or_missed)
    placement = place(trace, plan, derived)
    census = take(layout, ranks.share(f"{event}-held", holdings(placement), within), unused)
    if census.partial:
        plan = make_plan(trace, own_or_missed, census.partial)
        placement = place(trace, plan, derived)
        census = take(layout, ranks.share(f"{event}-held-again", holdings(placement), within), unused)
        if census.partial:
            names = [layout.tensors[n].name for n in sorted(census.partial)]
            raise PlacementError(f"{names[0]}: expected all ranks to keep a mirror of it, got one that cannot")
    again = [*own, *derived]
    plain = [module for module in plan.modules if module not in again]
    with without_lora(model):
        reload = Reload(model, vllm_config, again, plain) if again or plain else None
    return Attachment(model, placement, census, reload)


def _trace(model: Any, vllm_config: Any, layout: Layout, own: Sequence[nn.Module]) -> Trace:
    with Reload(model, vllm_config, own, []).as_loaded():
        return trace_loader(model, layout)


def _missed(model: Any, trace: Trace) -> Iterator[nn.Module]:
    """The modules of which the loader wrote a buffer or an attribute when it loaded, but not when it was traced."""
    for module, known in loaded(model).items():
        leaves = Attributes.of(module).leaves
        tensors = [module._buffers.get(name) for name in known.buffers]
        tensors += [leaves[path].tensor for path in known.made if path in leaves]
        places = {trace.storages.find(tensor) for tensor in tensors if tensor is not None} - {None}
        if not places <= trace.writers.keys():
            yield module


def are_in_checkpoint(vllm_config: Any, model: Any, layout: Layout, wanted: Mapping[int, int]) -> bool:
    """Whether the checkpoint that the engine serves has tensors, by number, of these fingerprints (u64)."""
    left = dict(wanted)
    for name, tensor in checkpoint_weights(vllm_config, model):
        number = layout.find(name)
        if number in left and tensor.shape == layout.tensors[number].shape:
            spec = layout.tensors[number]
            bits = tensor.to(spec.torch_dtype).contiguous().view(-1).view(INT_OF_WIDTH[spec.width])
            if int(fingerprint(bits, layout.seeds[number])) & U64_MASK != left.pop(number):
                return False
    return not left


def fill_mirrors(attachment: Attachment, vllm_config: Any, model: Any) -> None:
    """Read the opaque tensors from the checkpoint that the engine serves, as far as it has them."""
    wanted = dict(attachment.placement.mirrored())
    for name, tensor in checkpoint_weights(vllm_config, model) if wanted else ():
        if name in wanted and wanted[name].shape == tensor.shape:
            wanted[name].copy_(tensor)


def prove_reload(attachment: Attachment) -> None:
    """Show that reloading what the mirrors hold gives the bytes that the engine has now. Raises PlacementError."""
    if attachment.reload is None:
        return
    first = attachment.reload.digest()
    attachment.carry()
    if attachment.digest != first:
        raise PlacementError(
            "opaque and derived weights: expected the engine's own loader to make of the checkpoint what it made of it "
            "at the start, got other bytes; weights of this engine cannot be updated"
        )
