"""Codecs: how the payload of a block is written. One module each; their numbers are on the wire and never change."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from sparrowrl.delta.blocks import Block
from sparrowrl.delta.box import Box
from sparrowrl.delta.codecs import dense, fast
from sparrowrl.errors import UnsupportedFormat


class Codec(Protocol):
    """What a codec module offers."""

    NUMBER: int

    def encode(self, block: Block) -> bytes:
        """The payload, a multiple of 4 bytes long. The block is trusted: it is of this codec's type and not empty."""

    def decode(
        self,
        payload: npt.NDArray[np.int32],
        tensor: int,
        box: Box,
        count: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Block:
        """The block of `count` weights of integer type `dtype`, on `device`, from its payload.

        Nothing about the payload is trusted, box and count fit each other. Raises FormatError.
        """


CODECS: dict[int, Codec] = {codec.NUMBER: codec for codec in (dense, fast)}


def codec_of(number: int) -> Codec:
    """The codec of that number. Raises UnsupportedFormat if there is none."""
    try:
        return CODECS[number]
    except KeyError:
        raise UnsupportedFormat(f"codec: expected one of {sorted(CODECS)}, got {number}") from None
