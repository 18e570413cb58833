#!/usr/bin/env bash
# GRPO on GSM8K with OpenRLHF's asynchronous trainer and partial rollout: engines never stop sampling, and weights change
# under running requests.
# Data, once, from GSM8K's own file:
#   python3 -m sparrowrl.examples.gsm8k_grpo.openrlhf.data train.jsonl ~/data/gsm8k/openrlhf.jsonl
# Arguments are OpenRLHF's own flags and win over those below.
set -euo pipefail
DATA=${DATA:-$HOME/data/gsm8k/openrlhf.jsonl}
MODEL=${MODEL:-Qwen/Qwen3-1.7B}
OUT=${OUT:-$HOME/runs/gsm8k_openrlhf}
TRAINER_GPUS=${TRAINER_GPUS:-4}
ENGINE_GPUS=${ENGINE_GPUS:-4}

arguments=(
    # SparrowRL: the first line is all that it needs. With a journal of its own a job that is resumed goes on in it.
    --vllm.sync_backend sparrow
    --sparrow.journal_dir "$OUT/journal"

    --data.prompt_dataset "$DATA"
    --data.input_key input
    --data.label_key label
    --data.apply_chat_template
    --data.max_len 2560
    --reward.remote_url "$(dirname "$(realpath "$0")")/reward.py"

    --algo.advantage.estimator group_norm  # GRPO
    --algo.kl.init_coef 0
    --actor.eps_clip_low_high 0.2 0.28
    # Tokens of one completion may come from several versions: ratios to the engine's own probabilities, clipped.
    --algo.advantage.is_correction_level token
    --algo.advantage.is_correction_mode clip
    --algo.advantage.is_correction_threshold 0.5 5.0

    --actor.model_name_or_path "$MODEL"
    --actor.num_gpus_per_node "$TRAINER_GPUS"
    --actor.gradient_checkpointing_enable
    --actor.adam.lr 1e-6
    --ds.zero_stage 3
    --ds.param_dtype bf16
    --ds.packing_samples
    --train.async_enable
    --train.partial_rollout_enable
    --train.batch_size 1024  # of a rollout's 128 * 8: one optimizer step, and one sync, each
    --train.micro_batch_size 4
    --train.num_episodes 2

    --vllm.num_engines "$ENGINE_GPUS"
    --vllm.tensor_parallel_size 1
    --vllm.gpu_memory_utilization 0.8
    --vllm.enable_prefix_caching
    --rollout.batch_size 128
    --rollout.n_samples_per_prompt 8
    --rollout.max_new_tokens 2048
    --rollout.micro_batch_size 8

    --ckpt.output_dir "$OUT/trained"
    --ckpt.path "$OUT/checkpoints"
    --ckpt.save_steps 20
    --ckpt.load_enable
    --logger.tensorboard_dir "$OUT/tensorboard"
)
exec python3 -m sparrowrl.openrlhf_plugin.train_ppo_ray "${arguments[@]}" "$@"
