"""Triton runs in its interpreter where there is no GPU; this has to be set before its kernels are made."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
