"""OpenRLHF's weight sync by SparrowRL: `--vllm.sync_backend sparrow` (docs/openrlhf.md)."""
