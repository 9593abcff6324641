"""A real SGLang server per rollout group: its process, its weights, its answers."""
