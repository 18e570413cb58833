#!/usr/bin/env bash
# GRPO on GSM8K with verl's fully asynchronous trainer: engines never stop sampling, and weights change under them.
# Data, once, from GSM8K's own files, for train and for test:
#   python3 -m sparrowrl.examples.gsm8k_grpo.verl.data train.jsonl ~/data/gsm8k/train.parquet
# or in a clone of verl, which downloads them:
#   python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Arguments are verl's own overrides and win over those below.
set -euo pipefail
DATA=${DATA:-$HOME/data/gsm8k}
MODEL=${MODEL:-Qwen/Qwen3-0.6B}
TRAINER_GPUS=${TRAINER_GPUS:-4}
ENGINE_GPUS=${ENGINE_GPUS:-4}

arguments=(
    "hydra.searchpath=[pkg://verl.trainer.config]"

    # SparrowRL: the first line is all that it needs; docs/verl.md says what the others are for.
    actor_rollout_ref.rollout.checkpoint_engine.backend=sparrow
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=sparrowrl.verl_plugin
    actor_rollout_ref.rollout.load_format=auto

    algorithm.adv_estimator=grpo
    data.train_files="$DATA/train.parquet"
    data.val_files="$DATA/test.parquet"
    data.train_batch_size=0
    data.gen_batch_size=1
    data.return_raw_chat=True
    data.max_prompt_length=512
    data.max_response_length=1024
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.hybrid_engine=False

    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
    actor_rollout_ref.actor.use_kl_loss=False
    trainer.nnodes=1
    trainer.n_gpus_per_node="$TRAINER_GPUS"

    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.8
    actor_rollout_ref.rollout.calculate_log_probs=True
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
    rollout.nnodes=1
    rollout.n_gpus_per_node="$ENGINE_GPUS"
    rollout.n=8
    rollout.total_rollout_steps=15000

    # Samples may be half a sync older than the weights that train on them; four batches a sync.
    async_training.staleness_threshold=0.5
    async_training.trigger_parameter_sync_step=4
    async_training.require_batches=1
    async_training.partial_rollout=True

    "trainer.logger=[console]"  # verl's default also wants an account at wandb
    trainer.project_name=sparrowrl
    trainer.experiment_name=gsm8k_fully_async
    trainer.total_epochs=2
)
exec python3 -m verl.experimental.fully_async_policy.fully_async_main "${arguments[@]}" "$@"
