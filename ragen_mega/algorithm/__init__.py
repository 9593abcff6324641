"""The mathematics of StarPO: pure functions of tensors, without configuration and without ranks."""
