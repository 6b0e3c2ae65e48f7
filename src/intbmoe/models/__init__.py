"""Backbones, each readable in one file; the FFN of their MoE layers is whatever the caller makes."""
