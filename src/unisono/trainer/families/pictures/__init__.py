"""Image models: pictures with captions, Stable Diffusion pipelines, their LoRA files, and pictures
that they draw.
"""
