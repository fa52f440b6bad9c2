"""Sizes of a micro-batch on a rank: what layers compute with and send to each other, and so keep."""

from dataclasses import dataclass
from functools import cached_property

from megatronish.config.config import Config
from megatronish.core.layout import ExpertLayout


@dataclass(eq=False)
class MicroBatchSizes:
    """Sizes of a micro-batch on a rank of a config's layout. Sizes in bytes are those of the precision of layers."""

    config: Config
    vocab_size: int

    @cached_property
    def element(self) -> int:
        """Bytes of an element of activations."""
        return 4 if self.config.training.precision == "fp32" else 2

    @cached_property
    def tp(self) -> int:
        """Ranks that cut a layer."""
        return self.config.layout.tp

    @cached_property
    def cp(self) -> int:
        """Ranks that cut a sequence."""
        return self.config.layout.cp

    @cached_property
    def experts(self) -> ExpertLayout:
        """Ranks that deal experts out, and those that cut one."""
        return self.config.parallel.expert_layout

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a cp rank, before sequence parallelism cuts them."""
        training = self.config.training
        return training.seq_length * training.micro_batch_size // self.cp

    @cached_property
    def hidden(self) -> int:
        """Bytes of the hidden states of a micro-batch, H."""
        return self.tokens * self.config.model.hidden_size * self.element

    @cached_property
    def cuts_sequence(self) -> bool:
        """Whether there is sequence parallelism."""
        return self.config.parallel.sequence_parallel and self.tp > 1

    @cached_property
    def is_ring(self) -> bool:
        """Whether keys and values, or latents, go round a ring of cp ranks."""
        return self.cp > 1 and self.config.parallel.cp_comm_type == "p2p"

    @cached_property
    def padded_vocab(self) -> int:
        """Words of the vocabulary, padded for tp."""
        return self.config.model.padded_vocab_size(self.vocab_size, self.tp)

    @cached_property
    def freezes(self) -> bool:
        """Whether adapters learn, and the model itself is frozen."""
        return self.config.adapter.is_used
