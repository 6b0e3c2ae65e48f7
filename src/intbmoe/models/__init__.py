"""Backbones, each readable in one file; the caller supplies the FFN of their MoE layers."""
