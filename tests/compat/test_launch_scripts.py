"""Tests of launch scripts as they are: the dry run of each, and steps of each that flags at its end make small."""

from pathlib import Path

import pytest
from jobs import call_main, steps_of, tiny, train_on_ranks
from ranks import RankError
from sweeps import some_of
from test_megatron_flags import SCRIPTS, with_mock_data

DEEPSEEK = (
    "--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --num-experts 16 --moe-ffn-hidden-size 16 "
    "--moe-shared-expert-intermediate-size 32 --q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 8"
)
V3 = f"{DEEPSEEK} --num-layers 4 --moe-layer-freq ([0]*1+[1]*3)"
SHORT = (
    "--seq-length 16 --max-position-embeddings 16 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --lr-warmup-init 0 "
    "--vocab-size 64 --make-vocab-size-divisible-by 8 --save-interval 100 --eval-iters 1 --eval-interval 100"
)
IN_SAMPLES = "--train-samples 12 --lr-decay-samples 12 --lr-warmup-samples 4"
IN_STEPS = "--train-iters 3 --lr-decay-iters 3 --lr-warmup-iters 1"
SHRUNK = {
    "NVIDIA DeepSeek-V3 on H100": f"{V3} {IN_SAMPLES} --pp 2 --ep 2",
    "NVIDIA DeepSeek-V3 on GB200": f"{V3} {IN_SAMPLES} --pp 2 --ep 2",
    "Pai DeepSeek-V2-Lite": f"{DEEPSEEK} {IN_STEPS} --num-layers 3 --pp 2 --decoder-first-pipeline-num-layers 1 --dp 2",
    "Pai DeepSeek-V2": f"{DEEPSEEK} {IN_STEPS} --num-layers 3 --pp 2 --decoder-first-pipeline-num-layers 1 --ep 2",
    "Megatron-LM gpt-oss": "--num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 "
    "--num-query-groups 2 --moe-ffn-hidden-size 16 --window-size 7,0 --train-samples 12 --lr-decay-samples 12 --pp 2 "
    "--dp 2",
}
"""Flags at the end of a script: a small model, short texts and few ranks; all else is the script's."""
PARAMETERS = {
    "NVIDIA DeepSeek-V3 on H100": 682_636_472_320,  # 671.0e9 of the model, 11.6e9 of multi-token prediction
    "NVIDIA DeepSeek-V3 on GB200": 682_636_472_320,
    "Pai DeepSeek-V2-Lite": 16_320_425_472,  # the script has experts in the first layer, too
    "Pai DeepSeek-V2": 239_650_821_120,
    "Megatron-LM gpt-oss": 290_493_696,
}


@pytest.mark.long
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_script_is_a_dry_run_as_it_is(name: str) -> None:
    done = call_main([*with_mock_data(SCRIPTS[name]), "--vocab-size", "129280", "--dry-run"])
    assert done.status == 0, done.errors
    assert f"parameters: {PARAMETERS[name]:,}" in done.output


@pytest.mark.parametrize(
    "name", some_of(SHRUNK, ["NVIDIA DeepSeek-V3 on GB200", "Pai DeepSeek-V2", "Megatron-LM gpt-oss"])
)
def test_a_script_trains_with_a_small_model_at_its_end(name: str, tmp_path: Path) -> None:
    folders = {"run-dir": "run", "save": "save", "load": "save", "tensorboard-dir": "board"}
    own = [word for flag, folder in folders.items() for word in (f"--{flag}", str(tmp_path / folder))]
    words = [*with_mock_data(SCRIPTS[name]), *SHORT.split(), *SHRUNK[name].split(), *own, "--device", "cpu"]
    train_on_ranks(words, world_size=4)
    assert list(steps_of(tmp_path / "run")) == [1, 2, 3]


def test_a_script_that_loads_what_it_saves_starts_and_continues(tmp_path: Path) -> None:
    folder = f"--save {tmp_path}/save --load {tmp_path}/save"
    with pytest.raises(RankError, match="save holds no checkpoint"):
        train_on_ranks(tiny(tmp_path / "run", f"{folder} --exit-on-missing-checkpoint"))
    for steps in (2, 3):
        train_on_ranks(tiny(tmp_path / "run", f"{folder} --train-iters {steps}"))
    assert list(steps_of(tmp_path / "run")) == [1, 2, 3]
