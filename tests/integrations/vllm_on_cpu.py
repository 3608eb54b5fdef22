"""Import this ahead of vLLM: a wheel that was built for GPUs then takes this machine for a CPU.

vLLM's modules ask which platform it is while they are imported.
"""

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()
torch.accelerator.empty_cache = lambda: None  # which raises where there is no accelerator
