"""The rotary positions of Llama 3.1, over contexts that a small model has."""

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 1e3,
}  # fmt: skip
