"""Fitted kernel times: GEMM, attention, latent attention, experts, collectives."""
