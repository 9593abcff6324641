"""The file by which tools/gpu_check.sh knows that SGLang's default attention is there."""
