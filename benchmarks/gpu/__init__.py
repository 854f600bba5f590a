"""What the tool does on one CUDA device: `python -m benchmarks.gpu`."""
