"""Attention–FFN disaggregation: decode workers whose MLPs or experts lie on devices of their own."""
