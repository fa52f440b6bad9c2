"""Reader of an adapter in either format: PEFT's, or that of a run."""

import logging
from collections.abc import Iterable
from pathlib import Path

from megatronish.core.errors import UserError
from megatronish.formats.adapters import SavedAdapter, read_native
from megatronish.formats.peft import folder as peft
from megatronish.formats.peft.config import CONFIG
from megatronish.formats.weights import Description, LazyTensor, identity_of
from megatronish.parallel.all_or_none import all_or_none
from megatronish.parallel.mesh import Axis

logger = logging.getLogger(__name__)


def read_adapter(load: Path, description: Description) -> SavedAdapter:
    """Adapter in a folder of PEFT or of a run, for a model of this description."""
    return peft.read(load, description) if (load / CONFIG).is_file() else read_native(load)


def refuse_other_model(
    adapters: Iterable[SavedAdapter], base: dict[str, LazyTensor], *, source: Path, over: Axis
) -> None:
    """UserError if an adapter says that it was trained with other weights than these. Collective: it reads them all.

    PEFT's format does not say; of such an adapter the main rank tells the name of its base.
    """
    adapters = list(adapters)
    for adapter in adapters:
        if adapter.base is None and over.is_first:
            logger.warning(
                "the adapter %s does not record the weights that it was trained with, and they cannot be compared with "
                "those of %s; it calls its base %s",
                adapter.folder,
                source,
                adapter.base_name or "nothing",
            )
    known = [adapter for adapter in adapters if adapter.base is not None]
    if not known:
        return
    identity = identity_of(base, over=over)

    def compare() -> None:
        for adapter in known:
            if identity != adapter.base:
                raise UserError(
                    f"the adapter {adapter.folder} was trained with the weights {str(adapter.base)[:12]}, and {source} "
                    f"has the weights {identity[:12]}; name the model that it was trained with"
                )

    all_or_none(over, compare)
