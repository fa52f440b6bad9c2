"""Output layers: from the hidden states to the logits of the vocabulary, cut over tensor-parallel ranks."""

from torch import Tensor, nn

from megatronish.layers.embedding import VocabParallelEmbedding
from megatronish.layers.linear import ColumnParallelLinear, LinearLayer
from megatronish.parallel.mesh import TensorParallel
from megatronish.parallel.sharding import Cut, Init, Sharding


class OutputLayer(ColumnParallelLinear):
    """Output layer with a weight of its own, [S, B, D] (sequence parallel: [S/tp, B, D]) -> [S, B, V/tp].

    Padding of the vocabulary is not part of the weight's global tensor.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        padded_vocab_size: int,
        *,
        tp: TensorParallel,
        init_std: float,
    ) -> None:
        super().__init__(hidden_size, padded_vocab_size, tp=tp, bias=False, init_std=init_std)
        self.vocab_size = vocab_size

    def shardings(self) -> dict[str, Sharding]:
        """Rows are cut over tp, like the embedding's."""
        shape = (self.vocab_size, self.in_features)
        return {"weight": Sharding(shape, (Cut(0, "tp", self.sections),), role="head", init=Init(self.init_std))}


class TiedOutputLayer(LinearLayer):
    """Output layer that multiplies by the token embedding (Press & Wolf 2017, arXiv:1608.05859).

    [S, B, D] (sequence parallel: [S/tp, B, D]) -> [S, B, V/tp]. It owns no parameter.
    """

    def __init__(self, embedding: VocabParallelEmbedding) -> None:
        super().__init__()
        # A module inside a tuple is not a submodule: the weight has one name, the embedding's. It is looked up at each
        # use, for wrappers replace parameters.
        self._embedding = (embedding,)

    @property
    def weight(self) -> nn.Parameter:  # type: ignore[override]  # read alone: the embedding owns it
        """The embedding's table, [V/tp, D]."""
        return self._embedding[0].weight

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, D] (sequence parallel: [S/tp, B, D]) -> [S, B, V/tp], padding included."""
        return self.multiply(x, None, tp=self._embedding[0].tp)
