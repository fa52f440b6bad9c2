"""Tests of the rules of a config: each is told by its value, the rule and the remedy."""

import re

import pytest
from command_lines import problems, small

from megatronish.config.fields import FIELDS

AGAIN = "--recompute-granularity selective --recompute-modules"


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--tp 8",
            r"^num_attention_heads=12 must be divisible by tensor_model_parallel_size=8; use .* 1, 2, 3, 4, 6 or",
        ),
        ("--pp 16", r"^num_layers=12 is less than pipeline_model_parallel_size=16, .*; use --pp 12 or fewer"),
        ("--pp 8 --pipeline-schedule zb-v", r"^num_layers=12 is less than .*=8 x 2 chunks, .*; use --pp 6 or fewer"),
        ("--pipeline-schedule interleaved", r"^pipeline_schedule=interleaved needs several chunks a stage; add --num"),
        (
            "--pp 2 --pipeline-schedule zb-h1 --num-virtual-stages-per-pipeline-rank 2",
            r"^pipeline_schedule=zb-h1 has one chunk a stage, .*; use --pipeline-schedule interleaved",
        ),
        (
            "--pp 2 --pipeline-schedule zb-v --num-virtual-stages-per-pipeline-rank 3",
            r"^pipeline_schedule=zb-v has 2 chunks .*; leave the virtual stages out",
        ),
        (
            "--pp 2 --num-layers-per-virtual-pipeline-stage 4",
            r"^num_layers=12 must be divisible by .*=2 x num_layers_per_virtual_pipeline_stage=4; use --num-virtual",
        ),
        (
            "--pp 2 --num-layers-per-virtual-pipeline-stage 3 --num-virtual-stages-per-pipeline-rank 2",
            r"contradicts .*: both say how many chunks a stage holds; leave one of them out",
        ),
        (
            "--pp 3 --decoder-first-pipeline-num-layers 11",
            r"^decoder_first_pipeline_num_layers=11 leaves 1 of num_layers=12 to the other 2 stages, .*; use smaller",
        ),
        (
            "--pp 2 --decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 5",
            r"^decoder_first_.*=6 and decoder_last_.*=5 must add up to num_layers=12; change one by \+1",
        ),
        (
            "--decoder-last-pipeline-num-layers 4",
            r"^decoder_last_.*=4 needs pipeline_model_parallel_size > 1; add --pp",
        ),
        (
            "--pp 2 --pipeline-schedule zb-v --decoder-first-pipeline-num-layers 1",
            r"^decoder_first_.*=1 must be at least 2, a layer for each chunk of the stage; use more",
        ),
        (
            "--pp 2 --pipeline-split auto --decoder-first-pipeline-num-layers 5",
            r"contradicts .*: layers are shared out by hand or by weight; leave one of them out",
        ),
        ("--cp 3", r"^seq_length=64 must be divisible by 2 x context_parallel_size=3 = 6; use --seq-length 66"),
        (
            "--cp 2 --tp 12 --sequence-parallel",
            r"^seq_length=64 must be divisible by both 2 x .*=2 and .*=12 = 24; use --seq-length 72, or leave --seq",
        ),
        (
            "--cp 8 --tp 3 --cp-comm-type a2a",
            r"^cp_comm_type=a2a trades .*=12 / .*=3 = 4 must be divisible by context_parallel_size=8; use .* p2p",
        ),
        (
            "--cp 2 --attention-backend unfused",
            r"^attention_backend=unfused needs the scores of whole rows, and .* block by block; use --cp-comm-type a2a",
        ),
        ("--cp 2 --cp-comm-type ring", r"cp_comm_type must be one of p2p or a2a"),
        (
            "--recompute-granularity selective --recompute-method block",
            r"^recompute_method=block belongs to full recomputation, not to recompute_granularity=selective; add --rec",
        ),
        (
            "--recompute-modules mlp layernorm",
            r"^recompute_modules=mlp,layernorm belongs to selective .*=none; add --recompute-granularity selective, or",
        ),
        (f"{AGAIN} mlp mlp", r"^recompute_modules has mlp 2 times; name it once"),
        ("--use-mup --mup-width-mult nan", r"^mup_width_mult=nan must be finite; the default is 1.0$"),
        ("--use-mup --mup-width-mult inf", r"^mup_width_mult=inf must be finite; the default is 1.0$"),
        ("--use-mup --mup-base-head-dim nan", r"^mup_base_head_dim=nan must be finite; change --mup-base-head-dim$"),
        (
            f"{AGAIN} moe",
            r"^recompute_modules=moe needs experts, and num_experts=none; leave it out of --recompute-mod",
        ),
        (f"{AGAIN} moe_act", r"^recompute_modules=moe_act needs experts, and num_experts=none; leave it out"),
        (
            f"{AGAIN} shared_experts --num-experts 4",
            r"^recompute_modules=shared_experts needs shared experts, and moe_shared_expert_intermediate_size=none; l",
        ),
        (
            f"{AGAIN} moe moe_act --num-experts 4",
            r"^recompute_modules=moe computes moe_act again, too; leave one of th",
        ),
        (
            f"{AGAIN} mla_up_proj",
            r"^recompute_modules=mla_up_proj needs latent attention, and multi_latent_attention=f",
        ),
        (
            f"{AGAIN} layernorm --norm-placement output",
            r"^recompute_modules=layernorm needs norms before attention and MLP, and their norms are placed output",
        ),
        (
            f"{AGAIN} mlps",
            r"--recompute-modules mlps: recompute_modules must be a list of core_attn, layernorm, .* or mla_up_proj",
        ),
        ("--recompute-num-layers 2", r"^recompute_num_layers=2 belongs to full .*; add --recompute-granularity full"),
        (
            "--recompute-granularity full --distribute-saved-activations",
            r"^distribute_saved_activations .*size, which is 1; add --tp 2, or leave it out",
        ),
        (
            "--tp 2 --sequence-parallel --recompute-granularity full --distribute-saved-activations",
            r"^distribute_saved_activations .*, which --sequence-parallel does already; leave one",
        ),
        (
            "--profile-schedule --profile-step-start 3 --profile-step-end 3",
            r"^profile_step_end=3 must be greater than profile_step_start=3; use 4 for one step",
        ),
        (
            "--profile-schedule --profile-step-start 11 --profile-step-end 12",
            r"^profile_step_start=11 is after the last step, train_iters=10; use an earlier one",
        ),
        (
            "--use-distributed-optimizer --zero-stage 0",
            r"^use_distributed_optimizer=true is ZeRO-1 and contradicts zero_stage=0; leave one of them out",
        ),
        (
            "--pp 2 --pipeline-schedule zb-h1 --zero-stage 2",
            r"^zero_stage=2 exchanges gradients after every backward, but .*=zb-h1 .* later; use --zero-stage 1, or",
        ),
        (
            "--pp 2 --pipeline-schedule zb-v --zero-stage 3",
            r"^zero_stage=3 exchanges .*=zb-v computes those of weights later; .* or --pipeline-schedule 1f1b",
        ),
        (
            "--dp 2 --cp 2 --zero-stage 1 --dp-replicate 3",
            r"^num_dist.*_instances=3 must divide data_.*=2 x context_.*=2 = 4, .*; use --num-.*-instances 1, 2 or 4",
        ),
        (
            "--dp 2 --num-distributed-optimizer-instances 2",
            r"^num_dist.*_instances=2 groups .* share nothing with zero_stage=0; add --zero-stage 1, 2 or 3, or leave",
        ),
        (
            "--dp 2 --zero-quantized-gradients int8",
            r"^zero_quantized_gradients=int8 sends each rank .*; add --zero-stage 1, 2 or 3, or leave --zero-quant",
        ),
        (
            "--dp 2 --zero-stage 2 --bf16 --zero-quantized-gradients int4 --grad-reduce-in-bf16",
            r"^zero_quantized_gradients=int4 sends codes, and grad_reduce_in_bf16=true sends bf16; leave one",
        ),
        ("--hang-seconds 1e10", r"^hang_seconds=10000000000.0 must be at most 31536000; change --hang-seconds"),
        (
            "--zero-quantized-weights-block 64",
            r"^zero_quantized_weights_block=64 is of weights as codes, .*; add --zero-quantized-weights int8, or leave",
        ),
        (
            "--zero-quantized-weights int8 --zero-quantized-weights-block 20",
            r"^zero_quantized_weights_block=20 must be a multiple of 8, .*; use --zero-quantized-weights-block 16",
        ),
        (
            "--zero-quantized-weights int8 --adapter-type lora --load base",
            r"^zero_quantized_weights=int8 rounds what learns, and adapter_type=lora .*; use --quantize-base int8",
        ),
        (
            "--dp 8 --zero-stage 2 --zero-hpz-partition-size 4",
            r"^zero_hpz_partition_size=4 ranks keep .*, and zero_stage=2 shares no parameters; add --zero-stage 3, or",
        ),
        (
            "--dp 8 --zero-stage 3 --zero-hpz-partition-size 1",
            r"^zero_hpz_partition_size=1 must divide the 8 ranks .* into several groups of several ranks; "
            r"use --zero-hpz-partition-size 2 or 4$",
        ),
        ("--dp 8 --zero-stage 3 --zero_hpz_partition_size 8", r"^zero_hpz_partition_size=8 must divide the 8 ranks"),
        (
            "--dp 4 --cp 2 --dp-replicate 2 --zero-stage 3 --zero-hpz-partition-size 3",
            r"^zero_hpz_partition_size=3 must divide the 4 ranks .* data_parallel_size x context_.*; use .*-size 2$",
        ),
        ("--dp 3 --zero-stage 3 --zero-hpz-partition-size 2", r"=2 must divide the 3 ranks .*; leave it out$"),
        (
            "--num-experts 8 --ep 4 --dp 16 --zero-stage 3 --zero-hpz-partition-size 4",
            r"^zero_hpz_partition_size=4 x tensor_model_parallel_size=1 = 4 ranks must hold each expert several times, "
            r"and expert_model_parallel_size=4 x expert_tensor_parallel_size=1 = 4 hold it once; use .*-size 8, or a",
        ),
        (
            "--num-experts 8 --ep 4 --dp 8 --zero-stage 3 --zero-hpz-partition-size 4",
            r"= 4 ranks must hold each expert several times, .* hold it once; use a smaller --ep, or leave --zero-hpz-",
        ),
        (
            "--dp 2 --optimizer-cpu-offload",
            r"^optimizer_cpu_offload .*, and zero_stage=0 shares nothing; add --zero-stage 1, 2 or 3, or leave it out",
        ),
        (
            "--dp 2 --zero-stage 2 --param-cpu-offload",
            r"^param_cpu_offload .*, and zero_stage=2 shares no parameters; add --zero-stage 3, or leave it out",
        ),
        (
            "--dp 2 --zero-stage 1 --offload-folder /data",
            r"^offload_folder=/data is where .*, and nothing is offloaded; add --optimizer-cpu-offload, or --param-cpu",
        ),
        (
            "--dp 2 --zero-stage 1 --optimizer-cpu-offload --offload-folder=",
            r"^offload_folder is empty; name a folder on a local disk, or leave --offload-folder out",
        ),
        (
            "--dp 2 --zero-stage 1 --optimizer-cpu-offload --offload-folder s3://bucket/x",
            r"^offload_folder=s3://bucket/x is a URL, and is mapped into memory; name a folder on a local disk",
        ),
        (
            "--pp 2 --num-layers-per-virtual-pipeline-stage 3 --decoder-first-pipeline-num-layers 5",
            r"^num_layers_per_virtual_pipeline_stage=3 makes all chunks equal, .*; use --num-virtual-stages",
        ),
        (
            "--pp 2 --pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 1",
            r"^pipeline_schedule=interleaved needs several chunks a stage",
        ),
        ("--global-batch-size 400000", r"is 200000 micro-batches, and must be at most 100000; use a smaller batch"),
        ("--yaml-cfg x", r"is refused: use --config FILE.toml"),
        (f"--num-layers {10**11} --pp 7", r"^num_layers=10+ must be at most 100000; change --num-layers"),
        (f"--hidden-size {10**400}", r"^hidden_size=10+ must be at most 2147483647; change --hidden-size"),
        (
            "--distributed-timeout-minutes 1e20",
            r"^distributed_timeout_minutes=1e\+20 must be at most 525600; the default",
        ),
        (f"--seed {10**19}", r"^seed=10+ must be at most 9223372036854775807; the default is 1234"),
        ("--sample-prompt a\udcff", r"^'a\\udcff' is not UTF-8 text, as a config must be; type it again"),
        ("--run-dir=x\udcff", r"^'--run-dir=x\\udcff' is not UTF-8 text"),
        ("--tp 0", r"^tensor_model_parallel_size=0 must be at least 1; the default is 1"),
        ("--hidden-size 100", r"^hidden_size=100 must be divisible by num_attention_heads=12"),
        (
            "--ffn-hidden-size 99 --tp 2",
            r"^ffn_hidden_size=99 must be divisible by tensor_model_parallel_size=2; .* 1, 3,",
        ),
        (
            "--swiglu --hidden-size 12",
            r"^ffn_hidden_size derived from hidden_size=12 is 0, as swiglu's 8/3 of it is rounded down to a multiple "
            r"of 64; add --ffn-hidden-size",
        ),
        (
            "--group-query-attention --num-query-groups 5",
            r"^num_attention_heads=12 must be divisible by num_query_groups=5",
        ),
        (
            "--group-query-attention --num-query-groups 3 --tp 2",
            r"^one of num_query_groups=3 and tensor_model_parallel_size=2 must divide the other: a rank has whole "
            r"key/value heads, or several ranks share one; use --tensor-model-parallel-size 1$",
        ),
        (
            "--group-query-attention --num-query-groups 4 --tp 12 --kv-channels 4 --ffn-hidden-size 96",
            r"^with num_query_groups=4 and tensor_model_parallel_size=12 3 ranks share a key/value head, so they must "
            r"divide its 4 channels; use --tensor-model-parallel-size 1, 2 or 4$",
        ),
        ("--num-query-groups 3", r"^num_query_groups=3 needs group_query_attention .* add --group-query-attention"),
        (
            "--seq-length 63 --tp 2 --sequence-parallel",
            r"^seq_length=63 must be divisible by tensor_.*sequence-parallel out",
        ),
        ("--max-position-embeddings 32", r"^max_position_embeddings=32 must be at least seq_length=64; use --max-pos"),
        ("--position-embedding-type rope --kv-channels 7", r"^rotary_percent=1.0 of a head of size 7 is 7"),
        (
            "--position-embedding-type rope --kv-channels 8 --rope-scaling-type longrope --rope-short-factor 1 1 1",
            r"^rope_short_factor has 3 numbers, and rope_scaling_type=longrope needs one for each of the 4 pairs .*; "
            r"give 4 with --rope-short-factor",
        ),
        (
            "--position-embedding-type rope --kv-channels 4 --rope-scaling-type longrope --rope-short-factor 1 1 "
            "--rope-long-factor 1 0",
            r"^rope_long_factor has 0, and frequencies are divided by it; use numbers above 0 with --rope-long-factor",
        ),
        ("--xielu --num-experts 4", r"^xielu learns two numbers for each layer, and num_experts=4 leaves open for wh"),
        ("--xielu --squared-relu", r"contradicts .*: an MLP has one activation; leave one of them out"),
        ("--rope-scaling-type yarn", r"^rope_scaling_type=yarn needs position_embedding_type=rope"),
        (
            "--global-batch-size 7",
            r"^global_batch_size=7 must be divisible by micro_batch_size=2 x .* use --global-batch-.*8",
        ),
        (
            "--rampup-batch-size 3 2 10 --global-batch-size 8",
            r"^rampup_batch_size=3 2 10: START and INCREMENT must be div",
        ),
        (
            "--rampup-batch-size 2 4 10 --global-batch-size 8",
            r"^rampup.*plus a whole number of INCREMENTs; use .*size 10",
        ),
        ("--rampup-batch-size 1 2", r"^--rampup-batch-size 1 2: rampup_batch_size must be 3 whole numbers"),
        ("--min-lr 1", r"^min_lr=1.0 must not exceed lr=0.001"),
        ("--decoupled-min-lr 1e-4", r"^decoupled_min_lr=0.0001 needs the rate that decays to it; add --decoupled-lr"),
        ("--decoupled-lr 0", r"^decoupled_lr=0.0 must be greater than 0; change --decoupled-lr"),
        (
            "--decoupled-lr 1e-4 --min-lr 5e-4",
            r"^min_lr=0.0005 must not exceed decoupled_lr=0.0001; add --decoupled-min-lr, or a larger --decoupled-lr",
        ),
        (
            "--decoupled-lr 1e-4 --decoupled-min-lr 5e-4",
            r"^decoupled_min_lr=0.0005 must not exceed decoupled_lr=0.0001; use a smaller one, or a larger",
        ),
        ("--decoupled-lr 1e-4 --lr-warmup-init 5e-4", r"^lr_warmup_init=0.0005 must not exceed decoupled_lr=0.0001"),
        (
            "--window-attn-skip-freq 2",
            r"^window_attn_skip_freq=2 needs window_size or attention_pattern; add --window-size or --attention-pa",
        ),
        (
            "--window-size 8 --attention-pattern sliding",
            r"^attention_pattern=sliding has local blocks of its own, and window_size=8 is another way to see less",
        ),
        (
            "--attention-pattern fixed --attention-local-blocks 2 --attention-global-blocks 3",
            r"^attention_global_blocks=3 of attention_pattern=fixed are the last ones of a window of attention_local",
        ),
        (
            "--window-size 8 --window-attn-skip-freq [1]*3",
            r"^window_attn_skip_freq=\[1\]\*3 is a list of 3, and must have .* change --window-attn-skip-freq",
        ),
        (
            "--no-rope-freq 4",
            r"^no_rope_freq=4 needs position_embedding_type=rope; add --position-embedding-type rope, ",
        ),
        (
            "--position-embedding-type rope --no-rope-freq x",
            r"^no_rope_freq=x is no pattern; it must be a number N for",
        ),
        ("--glu-linear-offset 1", r"^glu_linear_offset=1.0 needs a gated MLP; add --quick-geglu or --swiglu, or leave"),
        ("--squared-relu --activation-func-clamp-value 7", r"^activation_func_clamp_value=7.0 needs a gated MLP"),
        ("--swiglu --activation-func-clamp-value 0", r"^activation_func_clamp_value=0.0 must be greater than 0"),
        ("--swiglu --glu-linear-offset inf", r"^glu_linear_offset=inf must be finite"),
        ("--softmax-type sinks", r"softmax_type must be one of vanilla, off-by-one or learnable"),
        (
            "--position-embedding-type alibi --use-rope-scaling",
            r"^rope_scaling_type=llama3 needs position_embedding_type=rope, not alibi",
        ),
        ("--lr-warmup-iters 10", r"^lr_warmup_iters=10 must be less than train_iters=10"),
        ("--lr-decay-style WSD", r"^lr_decay_style=WSD needs the length of its last part; add --lr-wsd-decay-iters"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 11", r"^lr_wsd_decay_iters=11 must not exceed train_iters=10"),
        ("--lr-decay-style cubic", r"must be one of constant, linear, cosine, inverse-square-root, WSD or range"),
        (
            "--cycle-min-momentum 0.8",
            r"^a momentum that cycles has two ends; add both --cycle-min-momentum and --cycle",
        ),
        (
            "--momentum-tail-growth 1",
            r"^momentum_tail_growth=1.0 needs a momentum that cycles; add --cycle-min-momentum",
        ),
        ("--cycle-min-momentum 0.9 --cycle-max-momentum 0.8", r"^cycle_min_momentum=0.9 must not exceed cycle_max_mom"),
        (
            "--cycle-min-momentum 0.8 --cycle-max-momentum 0.9 --lr-decay-style constant",
            r"needs a learning rate that falls after its peak, .*; use --lr-decay-style linear, cosine, WSD",
        ),
        ("--start-weight-decay 0.1", r"need a weight_decay_incr_style other than constant"),
        ("--weight-decay-incr-style linear", r"needs both ends; add --start-weight-decay and --end-weight-decay"),
        ("--adam-beta2 1", r"^adam_beta2=1.0 must be at least 0 and less than 1; the default is 0.999"),
        ("--hidden-dropout 1", r"^hidden_dropout=1.0 must be"),
        ("--fp16 --bf16", r"^--bf16 contradicts --fp16: a model is computed in one precision; leave one of them out"),
        (
            "--fp16 --initial-loss-scale 4 --min-loss-scale 8",
            r"^min_loss_scale=8.0 must not exceed initial_loss_scale=4.0; use a smaller one, or a larger --initial",
        ),
        ("--fp16 --min-loss-scale 0", r"^min_loss_scale=0.0 must be greater than 0; the default is 1.0"),
        (
            "--fp16 --initial-loss-scale inf",
            r"^initial_loss_scale=inf must be finite; the default is 42949",
        ),
        ("--fp16 --loss-scale -1", r"^loss_scale=-1.0 must not be negative; change --loss-scale"),
        ("--fp16 --hysteresis 0", r"^hysteresis=0 must be at least 1; the default is 2"),
        ("--fp16 --loss-scale-window 0", r"^loss_scale_window=0 must be at least 1; the default is 1000"),
        (
            "--fp16 --loss-scale 128 --hysteresis 3",
            r"^--loss-scale 128 contradicts --hysteresis 3: a loss scale that is given follows no rule; leave one",
        ),
        (
            "--fp16 --grad-reduce-in-bf16",
            r"^grad_reduce_in_bf16 rounds gradients further than a run in fp16 does; add --bf16, or leave it out",
        ),
        ("--clip-grad nan", r"^clip_grad=nan must be finite"),
        ("--lr inf", r"^lr=inf must be finite"),
        ("--window-size 0", r"^window_size=0 must be at least 1"),
        ("--split 1,2,3,4", r"^split='1,2,3,4' must be up to three parts"),
        ("--device tpu", r"^--device tpu: device must be one of auto, cpu or cuda"),
        ("--device cpu --distributed-backend nccl", r"^distributed_backend=nccl needs CUDA"),
        ("--finetune", r"^finetune takes its weights from a checkpoint, and none is given; add --load DIR"),
        ("--tp", r"^--tp: tensor_model_parallel_size must be a whole number"),
        ("--bf16 maybe", r"^--bf16 maybe: bf16 must be true or false"),
        ("--use-mcore-models yes", r"^--use-mcore-models yes must have no value; it has 1"),
    ],
)
def test_each_rule_is_told_by_value_rule_and_remedy(words: str, sentence: str) -> None:
    (told,) = problems(small("--mock-data", *words.split()))
    assert re.search(sentence, told), told


def test_every_number_has_a_range_and_every_whole_one_a_maximum() -> None:
    for field in FIELDS.values():
        bounds = [bound.is_maximum for bound in field.ranges]
        if field.type is int:
            assert bounds == [False, True], f"{field.name}: mark its least and its largest value"
        elif field.type is float:
            assert bounds in ([False], [False, True]), f"{field.name}: mark its range"
        else:
            assert not bounds, f"{field.name} is no number"
