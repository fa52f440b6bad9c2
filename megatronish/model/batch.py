"""What is one micro-batch? The tensors that data hands to the model."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward pass. Shapes are [B, S]; B samples of S tokens.

    `sample_ids` are global: a sample's number in the whole run's order, whatever rank or micro-batch it fell to.
    Dropout masks are named by them, so they do not depend on the layout. `document_ids` is None unless documents
    packed into one sample must not see each other.
    """

    tokens: Tensor  # int64 [B, S]
    labels: Tensor  # int64 [B, S], the token after each position
    loss_mask: Tensor  # bool [B, S], True where the prediction counts
    position_ids: Tensor  # int64 [B, S]
    sample_ids: Tensor  # int64 [B]
    document_ids: Tensor | None = None  # int64 [B, whole S], equal within a document, rising along the sequence

    @property
    def num_loss_tokens(self) -> int:
        """Predictions that count in the loss."""
        return int(self.loss_mask.sum())

    def at(self, places: Tensor) -> "MicroBatch":
        """The micro-batch of a cp rank that holds these places [s] of the sequence.

        Document ids stay whole: attention needs those of the keys that other ranks hold.
        """

        def cut(tensor: Tensor) -> Tensor:
            return tensor[:, places]

        return replace(
            self,
            tokens=cut(self.tokens),
            labels=cut(self.labels),
            loss_mask=cut(self.loss_mask),
            position_ids=cut(self.position_ids),
        )

    def to(self, device: torch.device) -> "MicroBatch":
        """A copy on `device`."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return MicroBatch(
            tokens=move(self.tokens),
            labels=move(self.labels),
            loss_mask=move(self.loss_mask),
            position_ids=move(self.position_ids),
            sample_ids=move(self.sample_ids),
            document_ids=None if self.document_ids is None else move(self.document_ids),
        )
