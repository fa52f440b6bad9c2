"""Can so many layers be dealt to so many pipeline stages? The rule, and a sentence where they cannot."""

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


def stages_problem(
    *, num_layers: int, num_stages: int, num_chunks: int, first: int | None, last: int | None
) -> str | None:
    """None, or why not: every chunk of every stage needs a layer, and told stages leave the others theirs."""
    chunks = f" x {num_chunks} chunks" if num_chunks > 1 else ""
    if num_layers < num_stages * num_chunks:
        most = num_layers // num_chunks
        remedy = f"use --pp {most} or fewer, or more layers" if most else "use fewer chunks a stage, or more layers"
        return (
            f"num_layers={num_layers} is less than pipeline_model_parallel_size={num_stages}{chunks}, and each of them "
            f"needs a layer; {remedy}"
        )
    told = {name: layers for name, layers in ((FIRST, first), (LAST, last)) if layers is not None}
    for name, layers in told.items():
        if num_stages == 1:
            return f"{name}={layers} needs pipeline_model_parallel_size > 1; add --pp 2, or leave it out"
        if layers < num_chunks:
            return f"{name}={layers} must be at least {num_chunks}, a layer for each chunk of the stage; use more"
    left, others = num_layers - sum(told.values()), num_stages - len(told)
    given = " and ".join(f"{name}={layers}" for name, layers in told.items())
    if others == 0 and left:
        return f"{given} must add up to num_layers={num_layers}; change one by {left:+d}, or leave one out"
    if left < others * num_chunks:
        stages = "stage, which needs" if others == 1 else f"{others} stages, which need"
        return (
            f"{given} leave{'s' if len(told) == 1 else ''} {max(left, 0)} of num_layers={num_layers} to the other "
            f"{stages} {others * num_chunks}; use smaller ones"
        )
    return None
