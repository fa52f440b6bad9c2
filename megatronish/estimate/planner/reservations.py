"""What the time of a plan does not know, or only guesses, of a config: a sentence each, printed with the times."""

from megatronish.config.config import Config
from megatronish.core.names import OBJECTIVE_NAMES

PRECISIONS = {"highest": "fp32", "high": "TF32 at half of the rate of 16 bits", "medium": "bf16"}


def reservations(config: Config) -> list[str]:
    """Sentences about times that no published step has confirmed, or that are left out."""
    found = []
    if config.adapter.is_used:
        text = (
            "adapters: the products of rank r and the frozen layers without weight gradients are counted; no "
            "measured step has confirmed them, and the host's part, twice that of a plain layer, is a guess"
        )
        if config.adapter.quantize_base is not None:
            text += "; decoding 4-bit weights is counted by its bytes alone, so steps may be longer"
        found.append(text)
    if OBJECTIVE_NAMES[config.training.objective].learns_from != "text":
        found.append(
            f"objective {config.training.objective}: rows are taken to be full, both completions of a pair in one; "
            "forward passes of a reference cost what the model's own do, and filling its pipeline; the loss over pairs "
            "is not counted"
        )
    if config.optimizer.optimizer == "muon":
        found.append(
            f"muon: {config.optimizer.muon_num_ns_steps} Newton-Schulz iterations of three products in "
            f"{PRECISIONS[config.optimizer.muon_fp32_matmul_prec]} for each matrix that a rank owns, and the exchange "
            "of all matrices are counted; no measured step has confirmed them"
        )
    if config.parallel.optimizer_cpu_offload or config.parallel.param_cpu_offload:
        found.append(
            "offloading: transfers over PCIe and the update by the CPU are not modelled, so every step is longer than "
            "printed"
        )
    return found
