"""What stands between the products of a decoder layer, fused: residual sums, norms, rotary embedding."""

from pallas_kernels.fused_norm.api import add_rms_norm, qk_norm_rope
from pallas_kernels.fused_norm.mosaic_gpu_heads import Heads
from pallas_kernels.fused_norm.reference import apply_rope, rms_norm

__all__ = ["Heads", "add_rms_norm", "apply_rope", "qk_norm_rope", "rms_norm"]
