"""CUDA graphs: functions recorded once, whose kernels a GPU then starts all at once, and layers that replay them."""
