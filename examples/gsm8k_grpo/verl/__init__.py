"""GRPO with verl: scripts for GPUs, and the same at a tiny scale on a CPU (README.md)."""
