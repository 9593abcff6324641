"""The compiler of loops and small matrix products for a processor, for layers and engine."""
