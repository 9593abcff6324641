"""Model families: names, shapes, cuts and memory, without a line of megatron-core."""
