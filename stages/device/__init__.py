"""What training needs from a device: the CPU, CUDA, and an accelerator emulated in host memory."""
